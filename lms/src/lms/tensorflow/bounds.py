"""What a step may hold, and the copies with which it holds no more."""

from __future__ import annotations

import re
from typing import Any

from lms.core.link import KNOWN, Link
from lms.core.plan import make_plan
from lms.core.static import make_static
from lms.core.trace import Trace
from lms.errors import LimitError, UsageError
from lms.memory.capacity import memory_capacity
from lms.options import Options
from lms.tensorflow.step import Step
from lms.tensorflow.swaps import Swaps, make_swaps, plain
from lms.units import format_size

KNOBS = ("swapout_threshold", "swapin_ahead", "swapin_groupby", "sync_mode")
_UNMEASURED = 8  # a limit that leaves so many times what a step's tensors take holds without a measured step
_ATTEMPTS = 4  # plans that are made for a limit: copies that are waited for late may need another
_FILE = Link("file", 1.5e9, 1.5e9, source="assumed: what a disk of a cloud's machine reaches")


class Bounds:
    """The bounds that `options` and TFLMS's `knobs` ask for. Raises UsageError for wrong ones."""

    def __init__(self, options: dict[str, Any], knobs: dict[str, int | None]) -> None:
        budget = options.get("budget")
        self._share: float | None = None  # of what the step's tensors take, if the budget is one
        if isinstance(budget, str) and (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", budget)):
            self._share = float(match[1]) / 100
            if self._share > 1:
                raise UsageError(f"budget={budget!r}: expected at most 100%")
            options = {**options, "budget": 0}
        self.is_all = self._share == 1  # whether the budget asks for nothing to move
        self.options = Options.parse(**options)
        self.knobs = {name: _knob(name, value) for name, value in knobs.items()}
        if self.knobs["sync_mode"] > 3:
            raise UsageError(f"sync_mode={knobs['sync_mode']!r}: expected 0, 1 (out), 2 (in), 3 (both), or -1")

    def of(self, trace: Trace) -> tuple[int | None, int | None]:
        """The limit or the budget, in bytes; the other is None."""
        if self._share is not None:
            return None, int(self._share * max(trace.live, default=0))
        return self.options.limit_of(memory_capacity()), self.options.budget

    def swaps(self, step: Step, replicas: int, *, on_device: bool, measured: bool, tries: bool) -> Swaps:
        """The copies. Each of several replicas has its part of what is above the base.

        `on_device` says that the step runs on another device than the processor; `measured` that it is known what
        operations need inside; `tries` that the step is to hold as little as possible. Raises LimitError.
        """
        limit, budget = self.of(step.trace)
        nothing = plain(step)
        if limit is not None:
            limit = step.base + (limit - step.base) // replicas
            known = measured or on_device
            room = (limit - step.base) // (1 if known else _UNMEASURED)
            if nothing.peak - step.base <= room and not tries:
                return nothing
            return self._under(step, limit, on_device) if known else self._swaps(step, on_device, budget=0)
        assert budget is not None
        return nothing if max(step.trace.live, default=0) <= budget else self._swaps(step, on_device, budget=budget)

    def _under(self, step: Step, limit: int, on_device: bool) -> Swaps:
        """Copies with which the step holds at most `limit` bytes. Raises LimitError if none are found."""
        target = limit
        for _ in range(_ATTEMPTS):
            try:
                swaps = self._swaps(step, on_device, limit=target)
            except LimitError:
                break
            if swaps.peak <= limit:
                return swaps
            target -= swaps.peak - limit
        swaps = self._swaps(step, on_device, budget=0)
        if swaps.peak <= limit:
            return swaps
        raise LimitError(
            f"limit {format_size(limit)} is below the floor of {format_size(swaps.peak)}: with every tensor swapped "
            f"that can be, the step still needs that much, of it {format_size(step.base)} before it begins. Raise "
            "the limit, or make the batch, the resolution or the width smaller"
        )

    def _swaps(self, step: Step, on_device: bool, *, limit: int | None = None, budget: int | None = None) -> Swaps:
        sync = self.knobs["sync_mode"]
        link = KNOWN["pcie3x16"] if on_device else _FILE
        write_ahead = 0 if sync in (1, 3) else self.options.write_ahead
        prefetch = 0 if sync in (2, 3) else self.options.prefetch
        schedule = make_plan(step.trace, link, limit=limit, budget=budget, prefetch=prefetch, write_ahead=write_ahead)
        static = make_static(step.trace, schedule)
        return make_swaps(step, static, ahead=self.knobs["swapin_ahead"], group=self.knobs["swapin_groupby"])


def _knob(name: str, value: int | None) -> int:
    if value is None:
        return -1
    if isinstance(value, bool) or not isinstance(value, int) or value < -1:
        raise UsageError(f"{name}={value!r}: expected a whole number, or None or -1 for the plan's choice")
    return value
