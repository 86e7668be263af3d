"""How much of the optimizers' state may stay on the device from step to step."""

from __future__ import annotations

from lms.core.budget import Client
from lms.runtime.planner import PassPlanner


class StateRoom:
    """Asks the planner's budget for its client `state`, which steps in parts of `part` bytes.

    If there are passes, which are recorded if `passes`, state stays in what the limit leaves beside all saved tensors,
    or as much as the planner found worth keeping. Else the peak since the last step tells what the device holds beside
    the state.
    """

    def __init__(self, planner: PassPlanner, state: Client, *, part: int, passes: bool) -> None:
        self._planner = planner
        self._state = state
        self._part = part
        self._passes = passes
        self._beside = 0  # most bytes of all else on the device, if no passes are recorded

    def now(self) -> int:
        """Bytes of state that may stay, asked before a step. Under a budget without a limit all of it leaves."""
        planner, state = self._planner, self._state
        budget, saved, device = planner.budget, planner.client, planner.device
        if budget.limit is None or (self.has_passes and not planner.progress.passes):
            return 0
        limit = budget.planned(0)
        # A step has scratch memory for one part, and moves one part out and one back beside the one that steps.
        part = min(self._part, state.wanted or self._part)
        free = limit - (device.current() - state.held) - part
        in_step = free if free >= state.wanted > 0 else free - 3 * part
        if self.has_passes:
            rest = limit - budget.outside - planner.above
            in_pass = max(rest - saved.wanted, min(planner.kept_state.nbytes, rest - saved.needed))
        else:
            self._beside = max(self._beside, device.peak().in_use - state.held)
            in_pass = limit - self._beside
        return max(0, min(in_step, in_pass))

    def after_step(self, nbytes: int, held: int) -> None:
        """An optimizer has stepped: `held` of the `nbytes` of state that may move are on the device now."""
        self.note(nbytes, held)
        if not self.has_passes:
            self._planner.peaks.after_a_step()

    def note(self, nbytes: int, held: int) -> None:
        """`held` of the `nbytes` of state that may move are on the device now."""
        self._state.wanted, self._state.held = nbytes, held

    @property
    def has_passes(self) -> bool:
        """Whether passes are recorded; after a step without one nothing was saved that may move."""
        progress = self._planner.progress
        return self._passes and (progress.passes > 0 or progress.steps == 0)
