"""An engine that keeps bytes in memory, counts, and fails or dawdles when it is told to.

A folder of tests is no package, so the tests get one as the fixture `tier` (conftest.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lms.errors import LMSError, SpillError, afresh
from lms.link import Link
from lms.memory.slots import Slot


class FakeCopy:
    """A copy that is over when somebody says so: at once, or when it is waited for."""

    span = None

    def __init__(self, nbytes: int, over: bool, failed: LMSError | None) -> None:
        self.nbytes = nbytes
        self.over = over
        self.failed = failed

    def done(self) -> bool:
        return self.over

    def wait(self) -> None:
        self.over = True
        if self.failed is not None:
            raise afresh(self.failed)  # as the real ones do: what is kept must not keep the frames that it passed

    synchronize = wait


class FakeEngine:
    """Keeps bytes in memory, counts, and fails or dawdles when it is told to."""

    name = "fake"
    device = torch.device("cpu")

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

    def calibrate(self, nbytes: int, piece: int = 0) -> Link:
        return self.link()

    def close(self) -> None:
        self.closed = True
