"""Tools for tests of the PyTorch runtime: the same training with and without LMS, compared bit for bit."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass

import pytest
import torch

from lms.runtime import plan_maker
from lms.torch.session import Session, disable

Step = Callable[[int], Iterable[torch.Tensor]]  # one training step; what it returns is compared


def bits(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    """What makes two tensors identical: dtype, shape and each bit (so NaN equals NaN, and 0 is not -0)."""
    tensor = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
    flat = tensor.resolve_conj().resolve_neg().contiguous().clone()
    return str(tensor.dtype), tuple(tensor.shape), bytes(flat.reshape(-1).view(torch.uint8).tolist())


@pytest.fixture(name="bits")
def _bits() -> Callable[[torch.Tensor], object]:
    return bits


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Generator[None, None, None]:
    """No session outlives its test, and nobody writes 256 MB to learn how fast the disk is."""
    monkeypatch.setattr(plan_maker, "CALIBRATION", 1 << 16)
    yield
    disable()


@pytest.fixture(scope="session", autouse=True)
def _exact_first_calls() -> None:
    """MKL's first call of a function may be less exact on one of several threads: pytorch/pytorch#188792."""
    for name in ("acos", "asin", "atan", "cos", "erf", "erfc", "exp", "log", "log10", "sin", "sqrt", "tan", "tanh"):
        for dtype in (torch.float32, torch.float64):
            getattr(torch, name)(torch.ones(1, dtype=dtype))


@pytest.fixture(scope="module", autouse=True)
def _quick_collections() -> None:
    """What was imported so far is no garbage: full collections must not look at it each time."""
    import torch._dynamo  # noqa: F401  # large, and an optimizer imports it with its first step

    gc.collect()
    gc.freeze()


def live(session: Session) -> int:
    """Records that autograd still holds."""
    gc.collect()
    return session._swapper.live


@pytest.fixture(name="live")
def _live() -> Callable[[Session], int]:
    return live


@pytest.fixture
def lms() -> Callable[..., Session]:
    """A session that swaps everything it sees, not yet open: budget 0, no least size."""

    def make(*models: torch.nn.Module, **options: object) -> Session:
        if not {"limit", "frac", "budget"} & options.keys():
            options["budget"] = 0
        options.setdefault("min_size", 0)
        return Session(list(models) or None, **options)  # type: ignore[arg-type]

    return make


@dataclass
class Outcome:
    """One run under LMS, over."""

    session: Session
    stats: dict[str, float | int | None]
    budget: int


def seeded(build: Callable[[], Step], steps: int, session: Session | None = None) -> list[list[object]]:
    """The bits of what each step returns; under `session`, which is opened and closed here, when it is given."""
    torch.manual_seed(7)
    step = build()
    if session is not None:
        session.open()
    try:
        results = []
        for index in range(steps):
            torch.manual_seed(100 + index)
            results.append([bits(tensor) for tensor in step(index)])
        return results
    finally:
        if session is not None:
            session.close()


def finish(session: Session) -> None:
    """Whatever a session that was closed has held must be given back."""
    assert live(session) == 0, "records outlived the graphs that they were saved for"
    assert session.engine.usage()["file"] == 0, "places in the slab outlived their records"


@pytest.fixture
def same_as_plain() -> Callable[..., list[Outcome]]:
    """Run `build()`'s steps plain, and under LMS with several shares of the saved bytes; all must be identical.

    What holds for every training is asserted for each run: held bytes within the budget and one record, nothing
    moved when all fits, nothing left behind.
    """

    def compare(
        build: Callable[[], Step], steps: int = 4, shares: Sequence[float] = (1.0, 0.4, 0.0), **options: object
    ) -> list[Outcome]:
        plain = seeded(build, steps)
        saved, outcomes = 1 << 40, []
        for share in shares:
            budget = int(saved * share)
            with warnings.catch_warnings():
                warnings.simplefilter("error", RuntimeWarning)
                session = Session(budget=budget, **({"min_size": 0} | options))  # type: ignore[arg-type]
                mine = seeded(build, steps, session)
            for index, (ours, theirs) in enumerate(zip(mine, plain, strict=True)):
                assert ours == theirs, f"step {index} differs from plain's with a budget of {budget}"
            stats = session.stats()
            assert stats["passes"], "no pass was seen: the test tests nothing"
            # An operation may use several records at once, and save one meanwhile; the plans' forecasts know of it.
            needed = max(guide.plan.forecast.held_peak for guide in session._planner.guides)
            assert stats["held_peak"] <= max(budget + 2 * session._planner.client.needed, needed)
            if share == 1.0:
                assert stats["swapped_out"] == stats["swapped_in"] == 0
                saved = stats["saved"]
                assert saved > 0
            else:
                assert stats["swapped_out"] > 0, "nothing moved: the test tests nothing"
            finish(session)
            outcomes.append(Outcome(session, stats, budget))
        return outcomes

    return compare


@pytest.fixture
def one_thread() -> Generator[None]:
    """PyTorch computes on one thread: on a busy machine several wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
