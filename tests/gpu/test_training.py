"""Training on a real GPU under a session: losses and gradients are plain training's, to the last bit, whatever is late.

They run from a bare source tree: `PYTHONPATH=lms/src python3 -m pytest tests/gpu`.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from lms.core.link import Link
from lms.errors import UsageError
from lms.runtime.planner import PassPlanner
from lms.torch.cuda.streams import CudaStreams
from lms.torch.session import Session

if not torch.cuda.is_available():
    pytest.skip("no GPU: torch.cuda.is_available() is False", allow_module_level=True)

pytestmark = pytest.mark.gpu

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic algorithms ask for it

GPU = torch.device("cuda", 0)
STEPS = 5  # the plan is made after the first, and anew after two of the later ones
EVERYTHING = 1 << 40  # bytes: a budget that all fits into
DELAY = 10_000_000  # cycles: some 5 to 10 ms

Batch = Callable[[], Tensor]


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)
    gc.collect()
    torch.cuda.synchronize()


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.two = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.two(self.relu(self.norm1(self.one(x)))))
        out += x
        return self.relu(out)


class Attention(nn.Module):
    """A block of a transformer, its attention written out: of the fused kernels not all are deterministic."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(later, float("-inf")).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


def resnet() -> tuple[nn.Module, Batch]:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(inplace=True),
        Residual(32),
        nn.AvgPool2d(2),
        Residual(32),
        nn.Flatten(),
        nn.Linear(32 * 16 * 16, 10),
    )
    return model.to(GPU), lambda: torch.randn(16, 3, 32, 32, device=GPU)


def transformer() -> tuple[nn.Module, Batch]:
    model = nn.Sequential(nn.Linear(32, 64), Attention(64, 4), Attention(64, 4), nn.LayerNorm(64), nn.Linear(64, 32))
    return model.to(GPU), lambda: torch.randn(8, 128, 32, device=GPU)


MODELS = {"a residual net": resnet, "a transformer": transformer}


def trained(
    build: Callable[[], tuple[nn.Module, Batch]], session: Session | None = None, *, delay: int = 0, steps: int = STEPS
) -> list[list[Tensor]]:
    """The loss and the gradients of each step; each forward and each backward begins `delay` cycles late."""
    torch.manual_seed(0)
    model, batch = build()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    shown = []
    with session if session is not None else nullcontext():
        for step in range(steps):
            torch.manual_seed(100 + step)
            x = batch()
            optimizer.zero_grad()
            hold_up(delay)
            loss = model(x).square().mean()
            hold_up(delay)
            loss.backward()
            shown.append([loss.detach().clone(), *(p.grad.clone() for p in model.parameters())])
            optimizer.step()
    torch.cuda.synchronize()
    return shown


def hold_up(cycles: int) -> None:
    if cycles:
        torch.cuda._sleep(cycles)


def assert_same(ours: list[list[Tensor]], theirs: list[list[Tensor]]) -> None:
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for index, (a, b) in enumerate(zip(mine, other, strict=True)):
            same = torch.equal(a.view(torch.int32), b.view(torch.int32))
            assert same, f"step {step}, {'loss' if index == 0 else f'gradient {index - 1}'} differs"


@pytest.mark.parametrize("model", MODELS)
def test_plain_training_repeats_itself(model: str) -> None:
    """Where it does not, the tests below say nothing."""
    assert_same(trained(MODELS[model]), trained(MODELS[model]))


@pytest.mark.parametrize("late", ["nothing", "the copies", "the computation"])
@pytest.mark.parametrize("model", MODELS)
def test_losses_and_gradients_are_those_of_plain_training(
    model: str, late: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = MODELS[model]
    plain = trained(build)
    if late == "the copies":
        copy = CudaStreams.copy

        def copy_late(self: CudaStreams, stream: object, destination: Tensor, source: Tensor) -> None:
            with torch.cuda.stream(stream):  # type: ignore[arg-type]
                hold_up(DELAY)
            copy(self, stream, destination, source)

        monkeypatch.setattr(CudaStreams, "copy", copy_late)
    delay = DELAY if late == "the computation" else 0

    session = Session(budget=EVERYTHING, min_size=0, device=GPU)
    assert_same(trained(build, session, delay=delay), plain)
    stats = session.stats()
    assert stats["swapped_out"] == stats["swapped_in"] == 0
    saved = stats["saved"]
    assert saved

    for budget in (int(0.35 * saved), 0):
        session = Session(budget=budget, min_size=0, device=GPU)
        assert_same(trained(build, session, delay=delay), plain)
        stats = session.stats()
        assert stats["passes"] == stats["steps"] == STEPS
        assert stats["swapped_out"] > 0
        assert stats["swapped_in"] > 0
        assert stats["host_peak"] > 0


@pytest.mark.parametrize(("model", "budget"), [("a residual net", 11_000_000), ("a transformer", 4_000_000)])
def test_losses_and_gradients_of_recomputed_modules_are_those_of_plain_training(
    model: str, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PassPlanner, "link", lambda _: Link("slow", 1e3, 1e3))  # it recomputes whatever it can
    plain = trained(MODELS[model], steps=10)
    session = Session(budget=budget, min_size=0, device=GPU, recompute=True)
    assert_same(trained(MODELS[model], session, steps=10), plain)
    assert session.plan is not None
    assert session.plan.choice is not None
    assert session.plan.choice.modules


@pytest.mark.parametrize("fused", [False, True])
def test_optimizer_state_that_is_away_between_steps_has_plains_bits(fused: bool) -> None:
    def train(*, swapped: bool) -> list[Tensor]:
        torch.manual_seed(1)
        net = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(24))).to(GPU)  # several parts of a step
        optimizer = torch.optim.AdamW(net.parameters(), 1e-3, fused=fused)
        session = Session(net, optimizer, budget=0, min_size=0, swap="optimizer") if swapped else nullcontext()
        with session:
            for _ in range(STEPS):
                optimizer.zero_grad()
                net(torch.ones(8, 1024, device=GPU)).square().mean().backward()
                optimizer.step()
            if isinstance(session, Session):
                assert session.stats()["state_held"] == 0
        return [*net.parameters(), *(one["exp_avg_sq"] for one in optimizer.state.values())]

    for ours, plain in zip(train(swapped=True), train(swapped=False), strict=True):
        assert torch.equal(ours, plain)


@pytest.mark.parametrize("swap", ["parameters", "parameters,gradients", "activations,optimizer,parameters,gradients"])
def test_parameters_and_gradients_that_are_away_between_uses_have_plains_bits(swap: str) -> None:
    def train(*, swapped: bool) -> list[Tensor]:
        torch.manual_seed(1)
        net = nn.Sequential(*(layer for _ in range(16) for layer in (nn.Linear(1024, 1024), nn.Tanh()))).to(GPU)
        optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
        session = Session(net, optimizer, budget=0, min_size=0, swap=swap) if swapped else nullcontext()
        with session:
            for _ in range(STEPS):
                optimizer.zero_grad()
                net(torch.ones(8, 1024, device=GPU)).square().mean().backward()
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)  # a use that nobody foresees
                optimizer.step()
            if isinstance(session, Session):
                stats = session.stats()
                assert stats["state_out"] > 0
                assert stats["state_held"] < stats["state"]
        return [*net.parameters(), *(one["exp_avg_sq"] for one in optimizer.state.values())]

    try:
        ours = train(swapped=True)
    except UsageError as error:
        pytest.skip(str(error))
    for one, plain in zip(ours, train(swapped=False), strict=True):
        assert torch.equal(one, plain)
