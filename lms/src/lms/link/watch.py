"""A thread that reads a link's counters while something trains, in a fiftieth of a core at most."""

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
SHARE = 0.015  # of a core that the readings may take: less than the promise, since waking the thread costs time too
_EARLY = 0.8  # of the time between two overflows of a counter: a reading may be late by the rest
_KEEP = 2000  # readings; every second one goes when there are more, so that a long run keeps its whole course
_DOUBT = 0.01  # of all bytes may be in doubt, and the figure is still told


@dataclass(frozen=True)
class Sample:
    """A stretch of time and its counts. None: no source reports it."""

    start: float  # seconds since the watch began
    end: float
    out: int | None  # bytes in it
    back: int | None
    memory: int | None  # bytes in use at its end


@dataclass(frozen=True)
class Watched:
    """All that was counted. `error` says why the watch ended early, if it did; `cost` is processor time in seconds."""

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
    """Watches `counters` from its creation to `stop`, which returns the counts."""

    def __init__(
        self, counters: Counters, *, interval: float = INTERVAL, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._counters = counters
        # On PCIe 5 NVIDIA's counter overflows every 68 ms, and a reading takes 0.7 ms of a core.
        self._interval = min(interval, _EARLY * counters.wraps / counters.most) if counters.most else interval
        self._clock = clock
        self._begun = clock()
        self._tally = Tally(counters.wraps, counters.most)
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
        return self._tally.watched(self._counters.what, cost=self._cost, error=self._error)

    def _run(self) -> None:
        cpu = time.thread_time()
        while not self._error:
            # Rest long enough that a reading, waking included, costs a small share of the time.
            spent = time.thread_time() - cpu
            cpu += spent
            self._cost += spent
            if self._stopped.wait(max(self._interval, spent / SHARE)):
                break
            self._add()
        self._cost += time.thread_time() - cpu

    def _add(self) -> None:
        try:
            self._tally.add(self._clock() - self._begun, self._counters.read())
        except (LMSError, OSError) as error:
            self._error = self._error or str(error)


class Tally:
    """Adds up the readings of counters as they come, however many there are.

    `wraps` and `most` are those of the counters. Pure.
    """

    def __init__(self, wraps: int = 1 << 64, most: float = 0.0) -> None:
        self._totals = _Total(wraps, most), _Total(wraps, most)
        self._kept: list[tuple[float, Reading]] = []  # with the totals in place of the counters
        self._count = 0
        self._last = 0.0
        self._longest = 0.0

    def add(self, at: float, reading: Reading) -> None:
        """A reading, `at` seconds."""
        took = at - self._last if self._count else 0.0
        self._last, self._longest = at, max(self._longest, took)
        out, back = (
            total.add(took, count) for total, count in zip(self._totals, (reading.out, reading.back), strict=True)
        )
        self._kept.append((at, replace(reading, out=out, back=back)))
        self._count += 1
        if len(self._kept) > _KEEP:
            self._kept = self._kept[::2]

    def watched(self, what: str, *, cost: float = 0.0, error: str = "") -> Watched:
        """All of it.

        If readings came so late that a counter may have overflowed unseen, and more than a hundredth of all bytes may
        be missing, no bytes are reported: no figure is better than a wrong one.
        """
        readings = self._kept
        samples = [
            Sample(start, end, _less(after.out, before.out), _less(after.back, before.back), after.memory)
            for (start, before), (end, after) in pairwise(readings)
        ]
        if any(total.doubtful() for total in self._totals):
            samples = [replace(sample, out=None, back=None) for sample in samples]
            error = error or (
                "the counters began anew, and may have done so more than once in "
                f"{self._longest:.2f} s: their bytes are not told"
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
            self._count,
            error,
        )


class _Total:
    """Counts the bytes since the counter's first reading, also across its overflows."""

    def __init__(self, wraps: int, most: float) -> None:
        self._wraps, self._most = wraps, most
        self._before: int | None = None
        self._bytes: int | None = 0
        self._doubt = 0  # bytes that may have passed unseen
        self._anew = False

    def add(self, took: float, count: int | None) -> int | None:
        """The bytes now, `took` seconds after the reading before; None once a reading had no count."""
        before, self._before = self._before, count
        if count is None:
            self._bytes = None
        if before is None or count is None or self._bytes is None:
            return self._bytes
        wraps = self._wraps if before < self._wraps else 1 << 64  # a count beyond 32 bits has more of them
        self._anew = self._anew or count < before
        counted = (count - before) % wraps
        self._doubt += max(0, int((self._most * took - counted) // wraps)) * wraps
        self._bytes += counted
        return self._bytes

    def doubtful(self) -> bool:
        """Whether too many bytes may have passed unseen. A counter that was never seen to overflow did not."""
        return self._anew and self._bytes is not None and self._doubt > _DOUBT * self._bytes


def _less(after: int | None, before: int | None) -> int | None:
    return after - before if after is not None and before is not None else None


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None
