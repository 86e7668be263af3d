"""The device: the memory that `limit` bounds, and the clock of the computation that uses it.

On a CPU it is the process's resident set. Memory that a framework manages, such as a GPU's, has its class there.
"""

from __future__ import annotations

import ctypes
import time
import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol, cast

from lms.errors import TOO_MANY_FILES, LMSError, UsageError, remedy
from lms.memory.capacity import memory_capacity
from lms.memory.page_pool import PagePool
from lms.memory.resident import ResidentSet
from lms.units import format_size

Mark = object  # a point in the computation's time, as its device gave it: for `elapsed` and nothing else

_SAFE = 0.9  # of the capacity: what an error suggests
_M_MMAP_THRESHOLD = -3  # malloc.h
_SLACK = 1 / 128  # of the limit: what idle pages leave free
_THRESHOLD = 65536  # bytes; blocks from here on get a mapping of their own, which goes back when they are freed


class Peak(NamedTuple):
    """Most bytes since the last `reset_peak`."""

    held: int  # what the limit bounds
    in_use: int  # less what is free and only kept for reuse: what the computation needs


class Device(Protocol):
    """The memory that a session keeps under a limit."""

    name: str
    reserved: int | None  # bytes for what is paged: if given, they count in the place of those that are

    def capacity(self) -> int:
        """Bytes that the device has for this process."""

    def current(self) -> int:
        """Bytes in use now, LMS's and all others."""

    def peak(self) -> Peak:
        """The most bytes since `reset_peak`."""

    def reset_peak(self) -> None:
        """Let `peak` begin anew."""

    def measure_anew(self) -> None:
        """Let `peak` begin anew, as after tensors have moved to other memory of the device."""
        self.reset_peak()

    def mark(self) -> Mark:
        """Now, a point in the computation's time. Never blocks."""

    def reached(self, mark: Mark) -> bool:
        """Whether the computation has come to `mark`. Never blocks."""
        return True

    def elapsed(self, marks: Sequence[Mark]) -> list[float]:
        """Seconds between neighbouring marks, one less than there are marks. May block until the last is reached."""

    def computed(self) -> float | None:
        """Seconds that the device has computed for this thread so far; None if it runs on its own, as a GPU does."""
        return None

    def prepare(self, limit: int | None) -> str | None:
        """Have freed memory count no longer. Returns a warning for the user if that cannot be done.

        Freed memory is kept for reuse only while `limit` holds. Raises UsageError if `limit` is above the capacity.
        """

    def release(self) -> None:
        """Return the memory that was kept for reuse, and keep no more."""


class CpuDevice(Device):
    """The resident set of this process, or of the forked child that asks.

    With a `pool` freed tensors stay in it, resident and ready for the next: the step then pays for no page twice. Idle
    pages are not in use, and are returned as far as the limit needs it. `sharing` processes use the machine's
    memory alike, this one included: the ranks of one host.

    Raises LMSError if the kernel's files that tell all this cannot be read.
    """

    name = "cpu"

    def __init__(self, pool: PagePool | None = None, sharing: int = 1) -> None:
        try:
            self._resident = ResidentSet()
            self._whole = memory_capacity()
        except OSError as error:
            raise _unreadable(error) from None
        self._sharing = sharing
        self._warned = False
        self._offered = pool
        self._pool: PagePool | None = None  # once it is in use
        self._limit: int | None = None
        self._outside = 0  # most resident bytes that were not the pool's
        self.reserved = None

    def capacity(self) -> int:
        """The lesser of what the machine has and what the control group allows, or this process's part of it."""
        return self._whole // self._sharing

    def current(self) -> int:
        """Resident bytes in use, exact to some pages a core."""
        if self._pool is None:
            return self._resident.current()
        usage = self._pool.usage()
        paged = usage.paged if self.reserved is None else self.reserved
        return self._resident.current() - usage.idle - usage.paged + paged

    def peak(self) -> Peak:
        """Most resident bytes since `reset_peak`, or of the process's life if the kernel refuses a reset."""
        resident = self._resident.peak()
        if self._pool is None:
            return Peak(resident, resident)
        usage = self._pool.usage()
        outside = resident - usage.peak
        if outside > self._outside:
            self._outside = outside
            self._bound()
        paged = usage.paged if self.reserved is None else self.reserved
        return Peak(resident, outside + usage.used_peak + paged)

    def _bound(self) -> None:
        if self._pool is not None and self._limit is not None:
            # Memory outside the pool may grow before it is looked at again.
            self._pool.keep(int(self._limit * (1 - _SLACK)) - self._outside)

    def reset_peak(self) -> None:
        """Let `peak` begin anew; if the kernel refuses, warn once and go on."""
        if self._pool is not None:
            self._pool.reset_peak()
        try:
            self._resident.reset_peak()
        except OSError as error:
            if error.errno in TOO_MANY_FILES:
                raise _unreadable(error) from None
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"the kernel refuses to reset the peak of the resident set ({error.strerror}): "
                    "`peak` is that of the whole process's life",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def measure_anew(self) -> None:
        """Let `peak` begin anew, and forget how much was outside the pool: as after tensors have moved into it."""
        self.reset_peak()  # the pool's and the kernel's together
        self._outside = 0
        self.peak()

    def mark(self) -> Mark:
        """The clock's reading."""
        return time.perf_counter()

    def elapsed(self, marks: Sequence[Mark]) -> list[float]:
        """Seconds between neighbouring marks."""
        times = cast("Sequence[float]", marks)
        return [after - before for before, after in pairwise(times)]

    def computed(self) -> float | None:
        """The thread's processor time. It takes part in all that the framework computes on several threads."""
        return time.thread_time()

    def prepare(self, limit: int | None) -> str | None:
        """Have tensors come from the pool, or else the C library return freed ones at once; what it costs.

        A limit is this process's own, so it may be above its even part of a shared host.
        """
        check_limit(limit, self._whole, "this process may use", "the machine's memory, or its control group's limit")
        self._limit = limit
        if self._offered is not None and self._offered.install():
            self._pool = self._offered
            self.measure_anew()
            return None
        return _return_freed() or (
            "the page pool is not there, so freed tensors are returned to the system at once, which costs time: "
            "compile it with `python -m lms.build torch`"
        )

    def release(self) -> None:
        """Tensors come from PyTorch's own allocator again; idle pages go back to the system."""
        if self._pool is not None:
            self._pool.retire()
            self._pool = None


def _unreadable(error: OSError) -> LMSError:
    advice = remedy(error, "LMS needs Linux's /proc")
    return LMSError(f"{error.filename}: {error.strerror}: it tells how much memory is in use; {advice}")


def check_limit(limit: int | None, capacity: int, whose: str, what: str) -> None:
    """Raise UsageError if `limit` is above `capacity` bytes, which `whose` and `what` describe in the message."""
    if limit is not None and limit > capacity:
        raise UsageError(
            f"limit {format_size(limit)}: {whose} {format_size(capacity)} ({what}), which no limit can be above; "
            f"give at most {format_size(_SAFE * capacity)}, or frac={_SAFE}"
        )


def _return_freed() -> str | None:
    """Have the C library return freed tensors to the system at once; the reason if it cannot be told to."""
    library = ctypes.CDLL(None)
    for symbol, name in (("mallctl", "jemalloc"), ("tc_version", "tcmalloc"), ("mi_version", "mimalloc")):
        if hasattr(library, symbol):
            return (
                f"memory comes from {name}, which keeps freed tensors for a while: the resident set may stay above "
                "the limit; start Python without it (LD_PRELOAD), or compile LMS's page pool with "
                "`python -m lms.build torch`"
            )
    mallopt = getattr(library, "mallopt", None)
    if mallopt is None or not mallopt(_M_MMAP_THRESHOLD, _THRESHOLD):
        return (
            "the C library's malloc cannot be told to return freed tensors to the system: the resident set may "
            "stay above the limit; compile LMS's page pool with `python -m lms.build torch`"
        )
    return None
