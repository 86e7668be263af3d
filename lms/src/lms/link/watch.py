"""A thread that reads a link's counters while something trains, in a hundredth of a core at most."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean

from lms.errors import LMSError
from lms.link.counters import Counters, Reading

INTERVAL = 0.1  # seconds between readings
SHARE = 0.005  # of a core that the readings may take: half of what is promised, for what the thread's own waking costs
_KEEP = 2000  # readings; every second one goes when there are more, so that a long run keeps its whole course


@dataclass(frozen=True)
class Sample:
    """A stretch of time and what was counted in it. None is what nobody tells."""

    start: float  # seconds since the watch began
    end: float
    out: int | None  # bytes in it
    back: int | None
    memory: int | None  # bytes in use at its end


@dataclass(frozen=True)
class Watched:
    """All that was counted. `error` says why it ended early, where it did; `cost` is seconds of processor time."""

    what: str
    seconds: float
    out: int | None  # bytes
    back: int | None
    memory: int | None  # most bytes in use at a reading
    busy: float | None  # mean share of the time
    samples: tuple[Sample, ...]
    cost: float
    readings: int
    error: str = ""


class Watch:
    """Watches `counters` from its beginning to `stop`, which gives what was counted."""

    def __init__(
        self, counters: Counters, *, interval: float = INTERVAL, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._counters = counters
        self._interval = interval
        self._clock = clock
        self._begun = clock()
        self._readings: list[tuple[float, Reading]] = []
        self._count = 0
        self._cost = 0.0
        self._error = ""
        self._stopped = threading.Event()
        self._add()
        self._thread = threading.Thread(target=self._run, name="lms-watch", daemon=True)
        self._thread.start()

    def stop(self) -> Watched:
        """The last reading, and all of them together. Idempotent."""
        if not self._stopped.is_set():
            self._stopped.set()
            self._thread.join()
            self._add()
            self._counters.close()
        return summary(
            self._counters.what,
            [(at - self._begun, reading) for at, reading in self._readings],
            wraps=self._counters.wraps,
            most=self._counters.most,
            cost=self._cost,
            count=self._count,
            error=self._error,
        )

    def _run(self) -> None:
        cpu = time.thread_time()
        while not self._error:
            # Rest so long that even this reading's cost is a small share of the time; waking is a part of it.
            spent = time.thread_time() - cpu
            cpu += spent
            self._cost += spent
            if self._stopped.wait(max(self._interval, spent / SHARE)):
                break
            self._add()
        self._cost += time.thread_time() - cpu

    def _add(self) -> None:
        try:
            self._readings.append((self._clock(), self._counters.read()))
        except (LMSError, OSError) as error:
            self._error = self._error or str(error)
            return
        self._count += 1
        if len(self._readings) > _KEEP:
            self._readings = self._readings[::2]


def summary(
    what: str,
    readings: Sequence[tuple[float, Reading]],
    *,
    wraps: int = 1 << 64,
    most: float = 0.0,
    cost: float = 0.0,
    count: int = 0,
    error: str = "",
) -> Watched:
    """What the readings (seconds, counters) say together. Pure.

    Counters that began anew between readings that lie so far apart that they may have done so twice (at `most` bytes a
    second) are not told at all: a figure that may be wrong is none.
    """
    samples = [
        Sample(
            start, end, _between(before.out, after.out, wraps), _between(before.back, after.back, wraps), after.memory
        )
        for (start, before), (end, after) in pairwise(readings)
    ]
    longest = max((sample.end - sample.start for sample in samples), default=0.0)
    if longest * most >= wraps and _began_anew([reading for _, reading in readings]):
        samples = [replace(sample, out=None, back=None) for sample in samples]
        error = error or (
            f"the counters began anew, and may have done so more than once in {longest:.2f} s: their bytes are not told"
        )
    memory = [reading.memory for _, reading in readings if reading.memory is not None]
    busy = [reading.busy for _, reading in readings if reading.busy is not None]
    return Watched(
        what,
        readings[-1][0] - readings[0][0] if readings else 0.0,
        _sum([sample.out for sample in samples]),
        _sum([sample.back for sample in samples]),
        max(memory, default=None),
        fmean(busy) if busy else None,
        tuple(samples),
        cost,
        count,
        error,
    )


def _between(before: int | None, after: int | None, wraps: int) -> int | None:
    """Bytes from one count to the next, which may have begun anew once."""
    if before is None or after is None:
        return None
    if after >= before:
        return after - before
    return after - before + (wraps if before < wraps else 1 << 64)


def _began_anew(readings: Sequence[Reading]) -> bool:
    return any(
        before is not None and after is not None and after < before
        for one, other in pairwise(readings)
        for before, after in ((one.out, other.out), (one.back, other.back))
    )


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None
