"""A plan, and the sequence of accesses that it was made for. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lms.core.drift import Drift
from lms.core.plan import Plan
from lms.core.schedule import Course
from lms.core.trace import AccessKind, Trace

Key = tuple[AccessKind, int, int]  # kind of access, tensor, its bytes

_CODES = {"write": 0, "hold": 1, "read": 2}  # Kind in saved_tensor_hooks.cc


class Timed(Protocol):
    """A pass that was timed."""

    @property
    def marks(self) -> Sequence[object]:
        """Points in the device's time; the last one is the end of the pass."""

    def gaps(self) -> list[float]:
        """Seconds of computation before each access, and in the tail. Waits until the device has reached the end."""


class Guide:
    """Leads a pass along a plan for as long as the pass does what the recorded one did."""

    def __init__(self, keys: Sequence[Key], trace: Trace, plan: Plan) -> None:
        self.keys = list(keys)
        self.codes = [4 * tensor + _CODES[kind] for kind, tensor, _ in keys]
        self.drift = Drift()
        self.follow(trace, plan)
        self.margin = 0  # bytes that the plan was asked to leave free, because real peaks were above foreseen ones
        self.proven = False  # something had moved before the plan was made, so it leaves no more free than it must
        self.passes = 0  # complete passes that followed it
        self.shown = True  # to the user: it is not of a pass that needs no plan
        self.samples: list[list[float]] = []  # gaps of the passes that were timed
        self._prefix = prefixes(self.keys)

    @property
    def outside(self) -> int:
        """Bytes that were on the device, saved tensors left out, when the recorded pass began."""
        return self.trace.accesses[0].other

    def follow(self, trace: Trace, plan: Plan, usual: float | None = None) -> None:
        """Take another trace of the same sequence, and the plan for it.

        `usual` are the seconds for which a whole pass computes, the trace's by default. A trace of medians has less
        than that if single accesses take long now and then.
        """
        self.trace = trace
        self.plan = plan
        self.usual = trace.seconds if usual is None else usual
        self.drift.forget()
        self.unread: Timed | None = None  # the last timed pass, until its times can be read without a wait
        self.course = Course(plan, plan.forecast.held_peak)
        moved = plan.moved()
        self.moves = [index in moved for index in range(len(trace.tensors))]
        self.pinned = [tensor.pinned for tensor in trace.tensors]
        self.sizes = [tensor.nbytes for tensor in trace.tensors]
        self.labels = [(tensor.module, tensor.dtype, tensor.shape) for tensor in trace.tensors]

    def expects(self, position: int, key: Key) -> bool:
        """Whether the recorded pass did this at that position."""
        return position < len(self.keys) and self.keys[position] == key

    def same(self, other: Guide) -> bool:
        """Whether both are for the same sequence of accesses."""
        return len(self._prefix) == len(other._prefix) and self._prefix[-1] == other._prefix[-1]

    def began_like(self, beginning: Sequence[int]) -> bool:
        """Whether the recorded pass began with the accesses that have these `prefixes`."""
        at = len(beginning) - 1
        return at < len(self._prefix) and self._prefix[at] == beginning[at]


def prefixes(keys: Sequence[Key]) -> list[int]:
    """A hash of each beginning of `keys`, the empty one first."""
    value = 0
    hashes = [value]
    for key in keys:
        value = hash((value, key))
        hashes.append(value)
    return hashes
