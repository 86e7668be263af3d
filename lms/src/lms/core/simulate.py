"""Predicts a step's time, stalls and memory from its trace, a schedule and a link. Pure: no clock, no framework.

The rules are the stepper's. Its mover moves nothing here: each direction of the link is a queue that copies one tensor
at a time, in order, and a clock advances with computation and waiting alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from lms.core.items import Copy, Item, Mover
from lms.core.link import Link
from lms.core.replay import end_step, replay
from lms.core.schedule import Course, Schedule
from lms.core.stepper import Stepper
from lms.core.timeline import Lane, Span
from lms.core.trace import Trace


@dataclass(frozen=True)
class Forecast:
    """The cost of a schedule. Seconds and bytes."""

    seconds: float  # the whole step
    stall_out: float  # waiting for copies out, so that memory is free
    stall_in: float  # waiting for copies back, so that a read has its tensor
    busy_out: float  # the link's time for the copies out
    busy_in: float
    held_peak: int  # most bytes of tensors held at once, copies in flight included
    resident_peak: int  # most bytes on the device, everything included; 0 when the trace did not measure the rest
    out: int  # bytes moved out
    back: int  # bytes moved back
    misses: int  # reads that had to start their own copy
    spans: tuple[Span, ...] = field(default=(), repr=False)
    held: tuple[tuple[float, int], ...] = field(default=(), repr=False)  # (seconds, bytes held from then on)


def simulate(
    trace: Trace,
    schedule: Schedule,
    link: Link,
    *,
    picture: bool = True,
    laps: int | None = None,
    most_held: int | None = None,
) -> Forecast:
    """The cost of executing `schedule` on `link`, with the computation that `trace` recorded.

    The figures are those of the last of `laps` steps: by default the third if tensors live on from step to step,
    because the first one or two begin in another state than the rest.
    A training that follows a plan makes room by the rule once it holds more than the plan's own forecast, `most_held`.
    Without the `picture` the forecast has no spans and no staircase of held bytes, and takes half the time to make.
    """
    if laps is None:
        laps = 3 if schedule.moves and any(tensor.freed is None for tensor in trace.tensors) else 1
    return _Simulation(trace, Course(schedule, most_held), link, picture=picture).run(laps)


def lingers_until(trace: Trace, index: int, at: int) -> int:
    """The access from which on the framework does not keep tensor `index`, once LMS let go of it at access `at`.

    The operation that wrote it keeps it, and so does each hold that comes before the next read or write.
    """
    until = trace.tensors[index].let_go or 0
    for touch in trace.touches[index]:
        kind = trace.accesses[touch].kind
        if touch > at and kind != "hold":
            break
        if kind != "read":
            until = max(until, touch + 1)
    return until


class _Clock:
    now = 0.0


class _Copy(Copy):
    """A copy on the link; `end` is when it is complete. It cannot fail, and the mover waits for it."""

    def __init__(self, clock: _Clock, end: float) -> None:
        self.clock = clock
        self.end = end

    def done(self) -> bool:
        return self.end <= self.clock.now


class _Simulation(Mover[Item]):
    """One run: the mover, and the driver that follows the trace. The tier below costs nothing."""

    def __init__(self, trace: Trace, course: Course, link: Link, *, picture: bool) -> None:
        self.trace, self.link = trace, link
        self.course = course
        self.clock = _Clock()
        self.position = 0
        self.lingering: dict[int, int] = {}  # tensors that LMS let go of and the framework holds, and until when
        self.lingering_bytes = 0
        self.free_at: dict[Lane, float] = {"out": 0.0, "back": 0.0}  # when each direction of the link is free
        self.picture = picture
        self.stepper = Stepper(self, room=lambda _: 0, changed=self._note_held if picture else None)

    def _begin_lap(self) -> None:
        self.began = self.clock.now
        self.missed = self.stepper.misses
        self.lingering.clear()
        self.lingering_bytes = 0
        self.stalls: dict[Lane, float] = {"out": 0.0, "back": 0.0}
        self.busy: dict[Lane, float] = {"out": 0.0, "back": 0.0}
        self.moved: dict[Lane, int] = {"out": 0, "back": 0}
        self.spans: list[Span] | None = [] if self.picture else None
        self.stairs: list[tuple[float, int]] = [(0.0, 0)] if self.picture else []
        if self.picture and self.stepper.holdings.held:
            self._note_held()
        self.resident_peak = 0

    def run(self, laps: int) -> Forecast:
        """Follow the trace to its end `laps` times."""
        trace, stepper = self.trace, self.stepper
        items: list[Item] = []
        for lap in range(laps):
            if lap:
                end_step(trace, stepper, items)
            self._begin_lap()
            items = replay(trace, self.course, stepper, self._reach, items)
            self._compute(trace.tail, trace.tail_other)
        return Forecast(
            seconds=self.clock.now - self.began,
            stall_out=self.stalls["out"],
            stall_in=self.stalls["back"],
            busy_out=self.busy["out"],
            busy_in=self.busy["back"],
            held_peak=stepper.holdings.held_peak,
            resident_peak=self.resident_peak,
            out=self.moved["out"],
            back=self.moved["back"],
            misses=stepper.misses - self.missed,
            spans=tuple(self.spans or ()),
            held=tuple(self.stairs),
        )

    def _reach(self, position: int) -> None:
        access = self.trace.accesses[position]
        self._compute(access.seconds, access.other)
        self.position = position
        if self.lingering:
            for index in [index for index, end in self.lingering.items() if end <= position]:
                del self.lingering[index]
                self.lingering_bytes -= self.trace.tensors[index].nbytes

    def _compute(self, seconds: float, other: int) -> None:
        if other:
            self.resident_peak = max(self.resident_peak, other + self.stepper.holdings.held + self.lingering_bytes)
        if seconds > 0:
            self._draw("compute", self.clock.now, self.clock.now + seconds)
            self.clock.now += seconds

    def _draw(self, lane: Lane, start: float, end: float, nbytes: int = 0, record: int = -1) -> None:
        if self.spans is not None:
            self.spans.append(Span(lane, start - self.began, end - self.began, nbytes, record))

    def _note_held(self) -> None:
        self.stairs.append((self.clock.now - self.began, self.stepper.holdings.held))

    # The stepper's mover

    def offload(self, item: Item) -> _Copy:
        """The copy out joins its queue."""
        return self._queue("out", item, self.link.seconds_out(item.nbytes))

    def reload(self, item: Item) -> _Copy | None:
        """The copy back joins its queue, unless the framework has kept the tensor."""
        if item.index in self.lingering:
            del self.lingering[item.index]
            self.lingering_bytes -= item.nbytes
            return None
        return self._queue("back", item, self.link.seconds_back(item.nbytes))

    def _queue(self, lane: Lane, item: Item, seconds: float) -> _Copy:
        start = max(self.clock.now, self.free_at[lane])
        self.free_at[lane] = end = start + seconds
        self._draw(lane, start, end, item.nbytes, item.index)
        self.busy[lane] += end - start
        self.moved[lane] += item.nbytes
        return _Copy(self.clock, end)

    def wait(self, item: Item, lane: Literal["out", "back"]) -> None:
        """The computation stands still until the copy is complete."""
        copy = item.departure if lane == "out" else item.arrival
        assert isinstance(copy, _Copy)
        if copy.end > self.clock.now:
            self.stalls[lane] += copy.end - self.clock.now
            self._draw("stall", self.clock.now, copy.end, item.nbytes, item.index)
            self.clock.now = copy.end

    def release(self, item: Item) -> None:
        """The memory is free once the framework has let go of it, too."""
        until = lingers_until(self.trace, item.index, self.position)
        if until > self.position:
            self.lingering[item.index] = until
            self.lingering_bytes += item.nbytes
