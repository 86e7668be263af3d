"""What this rank's collectives have come to: how many, how long, and which ranks it waited for."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import Structure, byref, c_double, c_uint64
from dataclasses import dataclass

from ddl import library
from ddl.job import size


@dataclass(frozen=True)
class Stats:
    """The figures of one rank since `init`, `resize` or `shrink`; times in seconds. Only calls that succeeded count.

    Allreduces, reduce-scatters and allgathers of 64 KiB or more among all ranks are timed.
    """

    calls: int  #: of all collectives, on all communicators
    bytes: int  #: of their buffers: of the larger one, if input and output differ
    timed: int  #: calls that were timed
    seconds: float  #: in which timed calls were in flight, one or several; a GPU's work before a call does not count
    least_seconds: float | None  #: that the measured links need for the timed calls; None: `init` measured none
    waited: Mapping[int, float]  #: for each rank that was waited for: how long, for its first message of timed calls
    late: Mapping[int, int]  #: for each rank that was late: at how many timed calls the wait was over half of the call

    @property
    def bound(self) -> float | None:
        """The share of the bound: `least_seconds` over `seconds`; None if either is not known."""
        return self.least_seconds / self.seconds if self.least_seconds and self.seconds else None


class _Stats(Structure):
    _fields_ = (
        ("calls", c_uint64),
        ("bytes", c_uint64),
        ("timed", c_uint64),
        ("seconds", c_double),
        ("least_seconds", c_double),
    )


def stats() -> Stats:
    """This rank's figures so far; any thread may ask. Raises StateError before `init`."""
    ranks = size()
    found, waited, late = _Stats(), (c_double * ranks)(), (c_uint64 * ranks)()
    library.call("ddl_get_stats", byref(found))
    library.call("ddl_get_waits", waited, late, ranks)
    return Stats(
        found.calls,
        found.bytes,
        found.timed,
        found.seconds,
        found.least_seconds or None,
        {rank: seconds for rank, seconds in enumerate(waited) if seconds},
        {rank: calls for rank, calls in enumerate(late) if calls},
    )
