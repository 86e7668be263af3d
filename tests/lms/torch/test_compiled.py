"""Training of compiled models: the bits of the compiled plain run, and nothing compiled because LMS is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from lms.torch.session import Session

Make = Callable[..., Session]
Step = Callable[[int], Iterable[Tensor]]
Compile = Callable[[nn.Sequential, object], Callable[[Tensor], Tensor]]

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # a compiler's advice


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    # torch imports _dynamo when it is first named. That takes seconds, and every worker collects all tests.
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def by_function(net: nn.Sequential, backend: object) -> Callable[[Tensor], Tensor]:
    return torch.compile(net, backend=backend)


def by_method(net: nn.Sequential, backend: object) -> Callable[[Tensor], Tensor]:
    net.compile(backend=backend)
    return net


def by_block(net: nn.Sequential, backend: object) -> Callable[[Tensor], Tensor]:
    for block in net:
        block.compile(backend=backend)
    return net


class Broken(nn.Module):
    """A module whose graph breaks in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return torch.sigmoid(self.second(x)) * x


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), Broken(), nn.Linear(16, 4))


def built(compile_: Compile, backend: object, models: ModuleType) -> Callable[[], Step]:
    def build() -> Step:
        torch._dynamo.reset()
        model = net()
        call = compile_(model, backend)
        return models.trained(model, lambda _: call(torch.randn(32, 8)).square().mean())

    return build


WAYS = [by_function, by_method, by_block]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_losses_and_gradients_are_those_of_compiled_plain_training(
    way: Compile, backend: str, models: ModuleType, same_as_plain: Callable[..., list]
) -> None:
    same_as_plain(built(way, backend, models), steps=3, shares=(1.0, 0.0))


def train(call: Callable[[Tensor], Tensor], steps: int = 3) -> None:
    for _ in range(steps):
        call(torch.randn(32, 8)).square().mean().backward()


@pytest.mark.parametrize("way", WAYS)
def test_a_session_compiles_nothing_again(way: Compile, lms: Make) -> None:
    backend = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    call = way(net(), backend)
    train(call)
    plain = backend.frame_count, dict(torch._dynamo.utils.counters["stats"])
    assert plain[0] > 0
    for _ in range(10):
        with lms() as session:
            train(call)
        assert session.stats()["swapped_out"] > 0
    assert (backend.frame_count, dict(torch._dynamo.utils.counters["stats"])) == plain


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("swap", ["activations", "activations,parameters,gradients"])
def test_what_is_compiled_under_a_session_is_what_is_compiled_without(way: Compile, swap: str, lms: Make) -> None:
    def graphs() -> int:
        torch._dynamo.reset()
        backend = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        train(way(net(), backend))
        return backend.frame_count

    plain = graphs()
    torch._dynamo.utils.counters.clear()
    with lms(swap=swap) as session:
        assert graphs() == plain, "LMS's own code was compiled, or it broke a graph"
    assert session.stats()["swapped_out"] > 0


def test_a_compiled_optimizer_steps_are_counted(lms: Make) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    @torch.compile(backend="eager")
    def step() -> None:
        optimizer.step()

    with lms() as session:
        for _ in range(4):
            model(torch.randn(32, 8)).square().mean().backward()
            step()
    assert session.stats()["steps"] == 4
    assert session.stats()["step_time"] > 0


@pytest.mark.parametrize("way", WAYS)
def test_what_a_compiled_backward_works_on_is_not_taken_for_the_script_s(way: Compile, lms: Make) -> None:
    """It lets go of what was saved before it works on it; what the script keeps meanwhile is the script's."""
    call = way(net(), "aot_eager")
    with lms(budget=1 << 40) as session:
        for _ in range(3):
            x = torch.tanh(torch.randn(32, 8, requires_grad=True))  # saved by both operations, and kept by this name
            call(x).square().mean().backward()
            assert session.trace is not None
            pinned = [record.nbytes for record in session.trace.records if record.pinned]
            assert pinned == [x.nbytes]
            assert session.trace.saved > 5 * x.nbytes
