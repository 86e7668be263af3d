"""Names of the modules that are running."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lms.torch.modules import ModuleNames
from lms.torch.session import Session


class Asking(nn.Module):
    """Notes which module is said to be running while it runs."""

    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self.said = said
        self.names: list[ModuleNames] = []

    def forward(self, x: Tensor) -> Tensor:
        self.said += [names.running() for names in self.names]
        if x.numel() == 0:
            raise ValueError("nothing")
        return x


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def net(said: list[str]) -> nn.Module:
    return nn.ModuleDict({"down": nn.Sequential(nn.ReLU(), Asking(said)), "up": Asking(said)})


class Root(nn.Module):
    """Calls its parts, one of which is not registered."""

    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self.body = nn.Sequential(Asking(said), nn.Sequential(Asking(said)))
        self.hidden = [Asking(said)]

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden[0](self.body(x))


def ask(names: ModuleNames, *nets: nn.Module) -> None:
    for net in nets:
        for part in net.modules():
            for asking in [part, *getattr(part, "hidden", ())]:
                if isinstance(asking, Asking):
                    asking.names = [names]


def test_the_innermost_module_has_the_name_that_its_model_gives_it(net: nn.Module, said: list[str]) -> None:
    names = ModuleNames([net])
    ask(names, net)
    net["up"](net["down"](torch.ones(2)))
    assert said == ["down.1", "up"]
    assert names.running() == ""


def test_without_a_model_names_are_those_of_the_outermost_module(said: list[str]) -> None:
    names, root = ModuleNames(), Root(said)
    ask(names, root)
    root(torch.ones(1))
    assert said == ["body.0", "body.1.0", "Asking"], "the last one is no registered part"
    assert names.running() == ""


def test_each_root_has_names_of_its_own(said: list[str]) -> None:
    names, teacher, student = ModuleNames(), Root(said), nn.Sequential(nn.Identity(), Asking(said))
    ask(names, teacher, student)
    for _ in range(2):
        student(teacher(torch.ones(1)))
    assert said == ["body.0", "body.1.0", "Asking", "1"] * 2


def test_a_part_that_runs_alone_keeps_the_name_that_it_has_in_its_root(said: list[str]) -> None:
    names, root = ModuleNames(), Root(said)
    ask(names, root)
    root(torch.ones(1))
    said.clear()
    root.body[1](torch.ones(1))
    assert said == ["body.1.0"]


def test_a_root_is_named_by_its_class(said: list[str]) -> None:
    names, alone = ModuleNames(), Asking(said)
    ask(names, alone)
    alone(torch.ones(1))
    assert said == ["Asking"]


def test_a_forward_that_raises_runs_no_more(net: nn.Module, said: list[str]) -> None:
    names = ModuleNames([net])
    ask(names, net)
    with pytest.raises(ValueError, match="nothing"):
        net["down"](torch.ones(0))
    assert names.running() == ""
    net["up"](torch.ones(1))
    assert said[-1] == "up"


def test_names_keep_no_model_alive(said: list[str]) -> None:
    names, root = ModuleNames(), Root(said)
    ask(names, root)
    root(torch.ones(1))
    gone = weakref.ref(root)
    del root
    gc.collect()
    assert gone() is None


def test_what_a_checkpoint_recomputes_has_the_names_of_the_forward(lms: Callable[..., Session]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
            return x

    with lms() as session:
        net = Net()
        for _ in range(2):
            net(torch.randn(4, 8, requires_grad=True)).sum().backward()
        assert session.trace is not None
        named = {record.module for guide in session._planner.guides for record in guide.trace.records}
    assert {name for name in named if "." in name} == {"blocks.0.1", "blocks.1.1", "blocks.2.1"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * 2


@pytest.mark.parametrize("compiled", [False, True])
def test_a_trace_names_modules_without_being_given_a_model(compiled: bool, lms: Callable[..., Session]) -> None:
    torch._dynamo.reset()
    net = nn.Sequential(nn.Linear(8, 8), Block(), nn.Tanh())
    if compiled:
        net[1].compile(backend="aot_eager")
    with lms() as session:
        net(torch.randn(4, 8)).sum().backward()
        assert session.trace is not None
        named = {record.module for record in session.trace.records}
    assert named == {"0", "1" if compiled else "1.inner", "2"}
