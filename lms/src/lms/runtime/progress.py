"""How far a training is: its passes, its steps, and the cycle from one step to the next."""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import dataclass, replace

from lms.core.trace import Trace
from lms.memory.device import Device, Mark

FIRST_STEPS = 2  # steps after which what a training needs is taken to be known
FIRST_PASSES = 3  # the same in passes with a backward, while no optimizer has stepped
KEPT = 9  # cycles that are remembered
KEPT_TIMES = 1000  # steps whose times are


@dataclass
class _Step:
    """Readings at the end of one step."""

    at: Mark
    computed: float | None  # Device.computed
    own: float
    recorded: int
    resumed: Mark | None = None  # the begin of the first pass after it


@dataclass(frozen=True)
class Cycle:
    """From the end of one step to the end of the next: seconds without what LMS added, and bytes."""

    seconds: float
    busy: float  # the seconds of these in which the device computed
    recorded: int  # bytes of the records of all its passes


class Progress:
    """Counts passes and optimizer steps, and clocks the cycle from each step to the next.

    A clock is read once a step and once a pass, never for a saved tensor. `cycles` may be read on any thread: whoever
    reads them asks the device nothing.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.passes = 0  # complete ones
        self.trained = 0  # those in which a backward ran
        self.steps = 0
        self.step_times: deque[float] = deque(maxlen=KEPT_TIMES)  # seconds from step to step, with all that LMS added
        self.elapsed = 0.0  # seconds from the end of the first step to that of the last
        self._stepped: float | None = None
        self._last: _Step | None = None
        self._unmeasured: deque[tuple[_Step, _Step]] = deque(maxlen=KEPT)
        self.cycles: deque[Cycle] = deque(maxlen=KEPT)  # those that the device was known to have come to the end of

    @property
    def early(self) -> bool:
        """Whether the training has only begun: what it needs may not be known yet, and it may still be ended."""
        return self.steps <= FIRST_STEPS if self.steps else self.trained <= FIRST_PASSES

    def begin_pass(self) -> None:
        """A pass begins."""
        last = self._last
        if last is not None and last.computed is None and last.resumed is None:
            last.resumed = self.device.mark()

    def end_pass(self, *, trained: bool) -> None:
        """A pass is complete; `trained`: a backward ran in it."""
        self.passes += 1
        self.trained += trained

    def step(self, own: float, recorded: int, *, clocked: bool = True) -> None:
        """An optimizer step has ended.

        `own` are the seconds that LMS's code and its waiting have taken so far, and `recorded` the bytes of all records
        so far. `clocked` is False if the device's clock cannot be read here: on another thread, in a CUDA graph's
        capture.
        """
        self.steps += 1
        now = time.perf_counter()
        if self._stepped is not None:
            self.step_times.append(now - self._stepped)
            self.elapsed += now - self._stepped
        self._stepped = now
        before = self._last
        self._last = _Step(self.device.mark(), self.device.computed(), own, recorded) if clocked else None
        if before is not None and self._last is not None:
            self._unmeasured.append((before, self._last))
        while clocked and self._unmeasured and self.device.reached(self._unmeasured[0][1].at):
            self.cycles.append(self._measured(*self._unmeasured.popleft()))

    def cycle(self, *, wait: bool = True) -> Cycle | None:
        """The median of the last cycles; None before the second step. `wait`: for the device to reach the last."""
        cycles = list(self.cycles)  # another thread may ask while a step is noted
        if wait:
            cycles += [self._measured(before, after) for before, after in list(self._unmeasured)]
        if not cycles:
            return None
        cycles = cycles[-KEPT:]
        return Cycle(
            statistics.median(cycle.seconds for cycle in cycles),
            statistics.median(cycle.busy for cycle in cycles),
            statistics.median_high(cycle.recorded for cycle in cycles),
        )

    def _measured(self, before: _Step, after: _Step) -> Cycle:
        (wall,) = self.device.elapsed([before.at, after.at])
        seconds = max(0.0, wall - (after.own - before.own))
        if before.computed is not None and after.computed is not None:
            busy = after.computed - before.computed
        elif before.resumed is not None:
            # The first mark waited for the work that a device of its own had queued when the step ended.
            busy = seconds - self.device.elapsed([before.at, before.resumed])[0]
        else:
            busy = seconds
        return Cycle(seconds, min(max(0.0, busy), seconds), after.recorded - before.recorded)

    def cycled(self, trace: Trace, *, wait: bool = True) -> Trace:
        """The trace of a pass with the cycle that the pass is part of, as far as it is known."""
        cycle = self.cycle(wait=wait)
        if cycle is None or not trace.saved:
            return trace
        seconds = max(cycle.seconds, trace.seconds)  # the pass may be one of the first, which are slower
        return replace(trace, cycle=seconds, busy=cycle.busy, passes=cycle.recorded / trace.saved)
