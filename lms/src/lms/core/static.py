"""A schedule for runtimes that cannot decide while they run: the control edges into and out of each copy.

A graph that is built before it runs (TensorFlow's) needs control edges in place of a stepper. They come from one run of
the stepper in the worst case: a copy out is complete only when it has been waited for, a copy back holds its memory
from the moment at which it may start. A real run with these edges holds no more at any access, however long its copies
take, as long as its operations run in the trace's order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from lms.core.items import Copy, Item, Mover
from lms.core.replay import replay
from lms.core.schedule import Course, Schedule
from lms.core.stepper import Stepper
from lms.core.trace import Trace


@dataclass(frozen=True)
class CopyOut:
    """A copy out. Copies out run one after the other, in the order in which they are listed."""

    tensor: int
    after: int  # it may start once this access is done
    gate: int | None  # everything after this access waits for the copy; None: nothing waits


@dataclass(frozen=True)
class CopyBack:
    """A copy back. Copies back run one after the other, in the order in which they are listed."""

    tensor: int
    out: int | None  # index of the copy out that wrote what it reads; None: an earlier step did
    trigger: int  # it may start once this access is done
    behind: tuple[int, ...]  # indices of the copies out that must be complete before it starts
    before: int  # the access that waits for it


@dataclass(frozen=True)
class StaticSchedule:
    """Copies and their edges. `held_peak` bytes of tensors are held at most, however long the copies take."""

    outs: tuple[CopyOut, ...]
    backs: tuple[CopyBack, ...]
    held_peak: int


def make_static(trace: Trace, schedule: Schedule) -> StaticSchedule:
    """The control edges with which `schedule` holds its memory for any delay of its copies."""
    return _Worst(trace, schedule).run()


class _OutCopy(Copy):
    """A copy out that is complete once it was waited for."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.over = False

    def done(self) -> bool:
        return self.over


class _Worst(Mover[Item]):
    """The stepper's mover in the worst case, and the driver that follows the trace."""

    def __init__(self, trace: Trace, schedule: Schedule) -> None:
        self.trace = trace
        self.course = Course(schedule)
        self.stepper: Stepper[Item] = Stepper(self, room=lambda _: 0)
        self.position = -1
        self.outs: list[CopyOut] = []
        self.backs: list[CopyBack] = []
        self.filled_by: dict[int, int] = {}  # tensor -> its last copy out
        self.waited_for: list[int] = []  # copies out that were waited for at this access

    def run(self) -> StaticSchedule:
        """Follow the trace to its end."""
        replay(self.trace, self.course, self.stepper, self._reach)
        return StaticSchedule(tuple(self.outs), tuple(self.backs), self.stepper.holdings.held_peak)

    def _reach(self, position: int) -> None:
        self.position = position
        self.waited_for.clear()

    def offload(self, item: Item) -> _OutCopy:
        """A copy out may start now."""
        index = len(self.outs)
        self.outs.append(CopyOut(item.index, self.position, None))
        self.filled_by[item.index] = index
        return _OutCopy(index)

    def reload(self, item: Item) -> None:
        """A copy back may start now, and its memory counts from now on."""
        end = len(self.trace.accesses)
        touches = [at for at in self.trace.touches[item.index] if self.trace.accesses[at].kind != "hold"]
        before = next((at for at in touches if at >= self.position), touches[0] + end)
        behind = tuple(self.waited_for)
        self.backs.append(CopyBack(item.index, self.filled_by.get(item.index), self.position, behind, before))

    def wait(self, item: Item, lane: Literal["out", "back"]) -> None:
        """Everything after the access at hand waits for the copy out; a copy back is there at once."""
        copy = item.departure
        assert isinstance(copy, _OutCopy)
        copy.over = True
        self.outs[copy.index] = replace(self.outs[copy.index], gate=self.position)
        self.waited_for.append(copy.index)

    def release(self, item: Item) -> None:
        """The memory is free."""
