"""Names of the modules that are running."""

from __future__ import annotations

from collections.abc import Generator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from lms.torch.modules import ModuleStack


class Asking(nn.Module):
    """Notes what the stack says while it runs."""

    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self.said = said
        self.stack: list[ModuleStack] = []

    def forward(self, x: Tensor) -> Tensor:
        self.said.append(self.stack[0].name())
        if x.numel() == 0:
            raise ValueError("nothing")
        return x


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def net(said: list[str]) -> nn.Module:
    return nn.ModuleDict({"down": nn.Sequential(nn.ReLU(), Asking(said)), "up": Asking(said)})


@pytest.fixture
def stack(net: nn.Module) -> Generator[ModuleStack, None, None]:
    stack = ModuleStack([net])
    for part in net.modules():
        if isinstance(part, Asking):
            part.stack = [stack]
    stack.watch()
    yield stack
    stack.stop()


def test_the_innermost_module_has_its_qualified_name(stack: ModuleStack, net: nn.Module, said: list[str]) -> None:
    net["up"](net["down"](torch.ones(2)))
    assert said == ["down.1", "up"]
    assert stack.name() == ""


def test_a_module_of_another_model_has_its_class(stack: ModuleStack, said: list[str]) -> None:
    other = Asking(said)
    other.stack = [stack]
    other(torch.ones(1))
    assert said == ["Asking"]


def test_a_forward_that_raises_leaves_the_stack(stack: ModuleStack, net: nn.Module, said: list[str]) -> None:
    with pytest.raises(ValueError, match="nothing"):
        net["down"](torch.ones(0))
    assert stack.name() == ""
    net["up"](torch.ones(1))
    assert said[-1] == "up"


def test_who_does_not_watch_costs_nothing(stack: ModuleStack, net: nn.Module, said: list[str]) -> None:
    stack.watch()  # twice is once
    stack.stop()
    stack.stop()
    net["up"](torch.ones(1))
    assert said == [""]
    assert not torch_module._global_forward_hooks
    assert not torch_module._global_forward_pre_hooks


def test_watching_that_ends_in_the_middle_of_a_forward_begins_anew(stack: ModuleStack, net: nn.Module) -> None:
    class Stopping(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            stack.stop()
            stack.watch()
            return x

    Stopping()(torch.ones(1))
    assert stack.name() == ""
