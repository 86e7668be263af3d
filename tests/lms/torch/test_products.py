"""Modules that run again in the backward, and keep their products: the same bits, and no product twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.lms.torch.test_recompute import Loss, bits, standing_in, train
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from lms.core.link import Link
from lms.core.plan import Choice
from lms.core.recompute import Candidate
from lms.runtime.planner import PassPlanner
from lms.torch import recompute
from lms.torch.session import Session

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _keeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest modules that can keep their products are recomputed, and keep them."""

    def choose(
        trace: object, link: object, candidates: Sequence[Candidate], *, limit: int | None, budget: int | None
    ) -> Choice:
        keeping = [one for one in candidates if one.name.endswith(" but its products")]
        fewest = min(len(one.within) for one in keeping)
        return Choice("as the test wants", {one.name: "" for one in keeping if len(one.within) == fewest})

    monkeypatch.setattr("lms.runtime.planner.choose", choose)
    monkeypatch.setattr(PassPlanner, "link", lambda _: Link("slow", 1e3, 1e3))


class Convolutions(TorchDispatchMode):
    """Counts them, those of the recomputation included."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation."""
        self.count += operation is torch.ops.aten.convolution.default
        return operation(*args, **(kwargs or {}))


def compare(build: Callable[[], nn.Module], loss: Loss, steps: int = 12, **options: Any) -> None:
    """Train plain and with kept products, and compare all of each step."""
    torch.manual_seed(7)
    plain = [[bits(tensor) for tensor in step] for step in train(build(), loss, steps)]
    torch.manual_seed(7)
    model = build()
    session = Session(model, recompute=True, **({"min_size": 0, "budget": 24_000} | options))
    chosen: set[str] = set()
    for index, step in enumerate(train(model, loss, steps, session)):
        assert [bits(tensor) for tensor in step] == plain[index], f"step {index} differs"
        if session._planner.choice is not None:
            chosen |= standing_in(model)
    assert chosen, "nothing keeps products: the test tests nothing"


def test_a_gpt_with_dropout_is_trained_to_the_last_bit(models: ModuleType) -> None:
    compare(models.GPT, lambda model: model.loss(torch.randint(32, (2, 17))))


def test_a_unet_whose_stages_work_in_place_is(models: ModuleType) -> None:
    def loss(model: nn.Module) -> Tensor:
        return functional.cross_entropy(model(torch.randn(1, 1, 8, 8, 8)), torch.randint(3, (1, 8, 8, 8)))

    compare(models.UNet, loss)


class Block(nn.Module):
    """Convolution, BatchNorm, ReLU in place: what ResNets are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.last = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu_(self.norm(self.one(x)))
        return functional.relu_(self.last(self.two(y)) + x)


def images(model: nn.Module) -> Tensor:
    """The loss of a batch."""
    result: Tensor = model(torch.randn(4, 4, 8, 8)).square().mean()
    return result


@pytest.mark.parametrize("options", [{}, {"budget": 0}, {"verify": True}])
def test_a_residual_net_computes_no_convolution_again(options: dict[str, Any]) -> None:
    build = lambda: nn.Sequential(*(Block() for _ in range(4)))  # noqa: E731
    compare(build, images, **options)
    model = build()
    counts = []
    steps = iter(
        train(model, images, 10, Session(model, recompute=True, **({"min_size": 0, "budget": 24_000} | options)))
    )
    for _ in range(10):
        with Convolutions() as convolutions:
            next(steps)
        counts.append(convolutions.count)
    assert standing_in(model)
    assert counts[0] == counts[-1] == 8, "each convolution runs once a step"


def test_a_product_that_is_changed_in_place_is_computed_again() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = (nn.Linear(16, 16) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            y = functional.silu(self.one(x))
            z = self.two(y).sigmoid_()  # the product itself is gone
            result: Tensor = self.three(z * y).sin()
            return result

    compare(lambda: nn.Sequential(*(InPlace() for _ in range(4))), lambda m: m(torch.randn(8, 16)).sum(), budget=1000)


def test_attention_with_dropout_is_computed_again() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.one(x).chunk(3, -1)
            mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.3 if self.training else 0.0)
            return functional.dropout(self.two(functional.dropout(mixed, 0.2)), 0.2) + x

    build = lambda: nn.Sequential(*(Attention() for _ in range(3)))  # noqa: E731
    compare(build, lambda model: model(torch.randn(4, 1, 8, 16)).square().mean())


def test_a_graph_that_is_used_twice_has_the_same_gradients_twice() -> None:
    torch.manual_seed(7)
    model = nn.Sequential(*(Block() for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Session(model, optimizer, recompute=True, min_size=0, budget=0):
        for _ in range(8):
            loss = images(model)
            first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
            again = torch.autograd.grad(loss, list(model.parameters()))
            assert list(map(bits, first)) == list(map(bits, again))
            optimizer.step()
        assert standing_in(model)


def test_what_a_module_keeps_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[recompute.Alternative] = []
    real = recompute.Watch.alternatives

    def alternatives(self: recompute.Watch, names: Any) -> Any:
        result = real(self, names)
        found.extend(result or ())
        return result

    monkeypatch.setattr(recompute.Watch, "alternatives", alternatives)
    compare(lambda: nn.Sequential(*(Block() for _ in range(3))), images)
    ways = {one.candidate.name: one for one in found}
    whole, keeping = ways["1"].candidate.calls[0], ways["1 but its products"].candidate.calls[0]
    assert ways["1 but its products"].kept == {0, 1}
    assert set(keeping.inputs) - set(whole.inputs), "both results are saved by BatchNorm anyway"
    assert keeping.extra_inputs == whole.extra_inputs
    assert keeping.seconds < whole.seconds
