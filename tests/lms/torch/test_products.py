"""Modules that run again in the backward, and keep their products: the same bits, and no product twice."""

from __future__ import annotations

from collections import Counter
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
    """Whatever can keep its products is recomputed and keeps them, the largest modules first."""

    def choose(
        trace: object, link: object, candidates: Sequence[Candidate], *, limit: int | None, budget: int | None
    ) -> Choice:
        numbers = [number for number, one in enumerate(candidates) if one.name.endswith(" but its products")]
        whole = {min(candidates[number].within, default=-1): number for number in numbers}  # of each module
        outer = {number for number in numbers if candidates[number].within <= set(whole)}
        largest = [one for one in outer if len(candidates[one].within) == min(len(candidates[n].within) for n in outer)]
        return Choice("as the test wants", {candidates[number].name: "" for number in largest})

    monkeypatch.setattr("lms.runtime.planner.choose", choose)
    monkeypatch.setattr(PassPlanner, "link", lambda _: Link("slow", 1e3, 1e3))


class Products(TorchDispatchMode):
    """Counts matrix products and convolutions of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Counter[str]()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation."""
        if operation._overloadpacket in (torch.ops.aten.addmm, torch.ops.aten.convolution):
            self.count[str(operation)] += 1
        return operation(*args, **(kwargs or {}))


def compare(build: Callable[[], nn.Module], loss: Loss, steps: int = 12, **options: Any) -> tuple[set[str], Session]:
    """Train plain and with kept products, and compare all of each step. Returns the modules that keep theirs."""

    def steps_of(session: Session | None, model: nn.Module) -> list[list[tuple[object, ...]]]:
        return [[bits(tensor) for tensor in step] for step in train(model, loss, steps, session)]

    torch.manual_seed(7)
    plain = steps_of(None, build())
    torch.manual_seed(7)
    model = build()
    session = Session(model, recompute=True, **({"min_size": 0, "budget": 24_000} | options))
    chosen: set[str] = set()
    for index, step in enumerate(train(model, loss, steps, session)):
        assert [bits(tensor) for tensor in step] == plain[index], f"step {index} differs"
        chosen |= standing_in(model) if session._planner.choice is not None else set()
    assert session._planner.choice is not None
    assert session._planner.choice.modules, "nothing keeps products: the test tests nothing"
    return chosen, session


def test_a_gpt_with_dropout_is_trained_to_the_last_bit(models: ModuleType) -> None:
    assert compare(models.GPT, lambda model: model.loss(torch.randint(32, (2, 17))))[0]


def test_a_unet_whose_stages_work_in_place_is(models: ModuleType) -> None:
    def loss(model: nn.Module) -> Tensor:
        return functional.cross_entropy(model(torch.randn(1, 1, 8, 8, 8)), torch.randint(3, (1, 8, 8, 8)))

    assert compare(models.UNet, loss)[0]


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
    assert compare(build, images, **options)[0]
    model = build()
    counts = []
    steps = iter(
        train(model, images, 10, Session(model, recompute=True, **({"min_size": 0, "budget": 24_000} | options)))
    )
    for _ in range(10):
        with Products() as products:
            next(steps)
        counts.append(products.count["aten.convolution.default"])
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

    chosen, _ = compare(
        lambda: nn.Sequential(*(InPlace() for _ in range(4))), lambda m: m(torch.randn(8, 16)).sum(), budget=1000
    )
    assert chosen


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
    assert compare(build, lambda model: model(torch.randn(4, 1, 8, 16)).square().mean())[0]


def test_a_graph_that_is_used_twice_has_the_same_gradients_twice() -> None:
    torch.manual_seed(7)
    model = nn.Sequential(*(Block() for _ in range(3)))
    session = Session(model, recompute=True, min_size=0, budget=24_000)
    for _ in train(model, images, 6, session):
        pass
    session = Session(model, recompute=True, min_size=0, budget=0).open()
    for _ in range(6):
        loss = images(model)
        first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        again = torch.autograd.grad(loss, list(model.parameters()))
        assert list(map(bits, first)) == list(map(bits, again))
    session.close()


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
