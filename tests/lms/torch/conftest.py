"""Tools for tests of the PyTorch runtime: the same training with and without LMS, compared bit for bit."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass

import pytest
import torch

from lms.errors import LMSError, SpillError, afresh
from lms.link import Link
from lms.slots import Slot
from lms.torch import planner
from lms.torch import session as session_module
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
    monkeypatch.setattr(planner, "CALIBRATION", 1 << 16)
    yield
    disable()


@pytest.fixture(scope="session", autouse=True)
def _quick_collections() -> Generator[None, None, None]:
    """What was imported so far is no garbage: full collections must not look at it each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


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
            assert stats["held_peak"] <= max(budget + 2 * session._planner._largest, needed)
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


class FakeCopy:
    """A copy that is over when somebody says so: at once, or when it is waited for."""

    span = None
    marks = None

    def __init__(self, nbytes: int, over: bool, failed: LMSError | None) -> None:
        self.nbytes = nbytes
        self.over = over
        self.failed = failed

    def done(self) -> bool:
        return self.over

    def wait(self) -> float:
        self.over = True
        if self.failed is not None:
            raise afresh(self.failed)  # as the real ones do: what is kept must not keep the frames that it passed
        return 0.0

    def synchronize(self) -> None:
        self.wait()


class FakeEngine:
    """Keeps bytes in memory, counts, and fails or dawdles when it is told to."""

    name = "fake"

    def __init__(self) -> None:
        self.slots: dict[int, tuple[Slot, torch.Tensor]] = {}
        self.offloads: list[int] = []  # bytes of each copy out
        self.reloads: list[int] = []
        self.slow = False  # copies are over when they are waited for
        self.full = False  # copies out fail
        self.broken = False  # copies back fail
        self.refusing = False  # nothing can even be started
        self.closed = False
        self.during: Callable[[], object] = lambda: None  # called in the middle of each offload

    def offload(self, source: torch.Tensor) -> tuple[Slot, FakeCopy]:
        if self.refusing:
            raise SpillError("the fake tier takes nothing")
        slot = Slot(source.nbytes)
        self.slots[id(slot)] = slot, source.clone()
        self.offloads.append(source.nbytes)
        self.during()
        failed = SpillError("the fake tier is full") if self.full else None
        return slot, FakeCopy(source.nbytes, not self.slow, failed)

    def reload(self, slot: Slot) -> tuple[torch.Tensor, FakeCopy]:
        self.reloads.append(slot.nbytes)
        failed = SpillError("the fake tier is broken") if self.broken else None
        return self.slots[id(slot)][1].clone(), FakeCopy(slot.nbytes, not self.slow, failed)

    def discard(self, slot: Slot) -> None:
        self.slots.pop(id(slot), None)

    def usage(self) -> dict[str, int]:
        used = sum(slot.nbytes for slot, _ in self.slots.values())
        return {"host": 0, "host_peak": 0, "file": used, "file_peak": used}

    def link(self) -> Link:
        return Link("fake", out=1e12, back=1e12, latency=0.0)

    def stalled(self) -> tuple[float, float]:
        return 0.0, 0.0

    def stream(self) -> None:
        return None

    def capturing(self) -> bool:
        return False

    def calibrate(self, nbytes: int) -> Link:
        return self.link()

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def tier(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """The engine of the next session: a fake one."""
    engine = FakeEngine()
    monkeypatch.setattr(session_module, "make_engine", lambda *_args, **_options: engine)
    return engine
