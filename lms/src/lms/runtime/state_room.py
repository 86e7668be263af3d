"""How much of the optimizers' state may stay on the device from step to step."""

from __future__ import annotations

from typing import NamedTuple

from lms.core.budget import Client
from lms.runtime.planner import PassPlanner
from lms.runtime.recorder import Recorder


class Room(NamedTuple):
    """Bytes of state that may be on the device."""

    stays: int  # from step to step
    in_step: int = 0  # at once while an optimizer steps; 0: as its parts need
    left: int = 0  # when the step is over, on its way out


class StateRoom:
    """Asks the planner's budget for its client `state`, which steps in parts of `part` bytes.

    If there are passes, which are recorded if `passes`, saved tensors come first: state stays in what the limit leaves
    beside all of them. Else the peak since the last step tells what the device holds beside the state.

    If state `lingers`, it may also be there as the planner's guest: it leaves while the next pass begins, and comes
    back while a pass ends. What the time around the step needs beside it is measured before that.
    """

    def __init__(self, planner: PassPlanner, state: Client, *, part: int, passes: bool, lingers: bool) -> None:
        self._planner = planner
        self._state = state
        self._part = part
        self._passes = passes
        self._lingers = lingers
        self.largest = 0  # bytes of the largest part in the last step
        self._seen: Recorder | None = None  # of the last pass that was measured
        self._before: int | None = None  # most bytes beside the state from a pass's end to the step
        self._after: int | None = None  # and from there to the next pass
        self._there = 0  # bytes of state on the device when the last step was over
        self._steps = 0
        self._passes_before = 0  # when the last step was over
        self._passes_a_step = 1
        self._beside = 0  # most bytes of all else on the device, if no passes are recorded

    def now(self) -> Room:
        """The room, asked before a step. Under a budget without a limit all state leaves."""
        planner, state = self._planner, self._state
        budget, saved, device = planner.budget, planner.client, planner.device
        if budget.limit is None or (self.has_passes and not planner.progress.passes):
            return Room(0)
        limit = budget.planned(0)
        # A step has scratch memory for one part, and moves one part out and one back beside the one that steps.
        part, guests = min(self._part, state.wanted or self._part), planner.guests.nbytes
        free = limit - (device.current() - state.held - guests) - part
        in_step = free if free >= state.wanted > 0 else free - 3 * self._part
        if self.has_passes:
            in_pass = limit - budget.outside - planner.above - saved.wanted
        else:
            self._beside = max(self._beside, device.peak().in_use - state.held)
            in_pass = limit - self._beside
        stays = max(0, min(in_step, in_pass))
        if not self._lingers or not self.has_passes:
            return Room(stays)
        last = planner.last.recorder if planner.last is not None else None
        if last is not None and last.measure and last is not self._seen:
            # The device's peak is that of the time since that pass.
            self._seen = last
            self._before = max(self._before or 0, device.peak().in_use - state.held - guests)
        if self._steps:
            self._after = max(self._after or 0, planner.peaks.after_step - self._there)
        after = limit - self._after - stays if self._after is not None else 0
        return Room(stays, max(0, free - part), max(0, after))

    def coming(self) -> int:
        """Bytes of state that may be on the device before a step, besides those that stay; 0 in another step's pass."""
        planner, state = self._planner, self._state
        passes = planner.progress.passes + 1 - self._passes_before
        if self._before is None or planner.limit is None or passes < self._passes_a_step:
            return 0
        return planner.budget.planned(0) - self._before - state.held - 3 * max(self._part, self.largest)

    def after_step(self, nbytes: int, held: int) -> None:
        """An optimizer has stepped: `held` of the `nbytes` of state that may move are on the device now."""
        planner = self._planner
        self.note(nbytes, held)
        if not self.has_passes:
            planner.peaks.after_a_step()
        elif self._lingers:
            self._steps += 1
            passes = planner.progress.passes
            if passes > self._passes_before:
                self._passes_a_step, self._passes_before = passes - self._passes_before, passes
            self._there = held + planner.guests.nbytes
            planner.peaks.optimizer_stepped()

    def note(self, nbytes: int, held: int) -> None:
        """`held` of the `nbytes` of state that may move are on the device now."""
        self._state.wanted, self._state.held = nbytes, held

    @property
    def has_passes(self) -> bool:
        """Whether passes are recorded; after a step without one nothing was saved that may move."""
        progress = self._planner.progress
        return self._passes and (progress.passes > 0 or progress.steps == 0)
