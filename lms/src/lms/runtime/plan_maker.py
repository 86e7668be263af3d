"""Makes plans for recorded passes, within a session's limit and by its options."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from lms.core.budget import Budget, Client
from lms.core.guide import Guide
from lms.core.link import Link
from lms.core.plan import Plan, floor, make_plan, plain_peak
from lms.core.trace import Trace
from lms.memory.device import Device
from lms.memory.machine import kernel
from lms.runtime.kept_state import KeptState
from lms.runtime.peaks import Peaks
from lms.runtime.recorder import Recorder
from lms.units import format_size
from lms.warn import warn_script

_LEAST_PIECE = 1 << 20  # bytes of one copy, if the limit leaves no room for more
CALIBRATION = 256 * 10**6  # bytes written and read when a link must be known before anything was moved


class Tier(Protocol):
    """The tier below, for the planner."""

    def link(self) -> Link | None:
        """Bandwidth and latency of the copies so far; None before any."""

    def calibrate(self, nbytes: int, piece: int = ...) -> Link:
        """Copy `nbytes` out and back, `piece` bytes at a time, and measure. The device holds twice that meanwhile."""


class PlanMaker:
    """Knows what bounds a plan: the limit and what is left of it, the link, and the options.

    `saved` are the saved tensors. `facts` go into each trace beside the system and Python: the framework's version,
    for example.
    """

    def __init__(
        self,
        device: Device,
        tier: Tier,
        budget: Budget,
        saved: Client,
        kept_state: KeptState,
        peaks: Peaks,
        *,
        prefetch: int | None,
        write_ahead: int | None,
        write_early: bool,
        facts: Mapping[str, str],
    ) -> None:
        self._device = device
        self._tier = tier
        self._budget = budget
        self._saved = saved
        self._kept_state = kept_state
        self._peaks = peaks
        self._prefetch = prefetch
        self.write_ahead = write_ahead
        self._write_early = write_early
        self._facts = facts
        self._warned = False

    def link(self) -> Link:
        """The link to the tier below, measured on past copies, or by copying something now."""
        known = self._tier.link()
        if known is not None:
            return known
        with self._peaks.apart("while the link was measured,"):  # the training itself does not need what this takes
            if self._budget.limit is None:
                return self._tier.calibrate(CALIBRATION)
            free = self._budget.planned(0) - self._device.current()
            return self._tier.calibrate(CALIBRATION, max(free // 2, _LEAST_PIECE))

    def trace(self, recorder: Recorder, times: Sequence[float] | None = None) -> Trace:
        """What `recorder` saw, with `times` instead of its own if they are given."""
        link = self._tier.link()
        system = {
            "system": f"{platform.system()} {kernel()} {platform.machine()}",
            "python": platform.python_version(),
        }
        return recorder.trace(
            self._device.capacity(), link.to_dict() if link is not None else {}, {**system, **self._facts}, times
        )

    def measured_again(self, guide: Guide, recorder: Recorder) -> Trace:
        """The guide's trace as its last pass measured it, with the median of the times so far."""
        before = guide.trace
        times: Sequence[float] = before.times
        if guide.samples:
            times = [statistics.median(column) for column in zip(*guide.samples, strict=True)]
        trace = self.trace(recorder, times)
        return replace(
            trace.with_measured(times, (trace if recorder.measure else before).others),
            tensors=tuple(
                replace(new, module=old.module, let_go=new.let_go if new.let_go is not None else old.let_go)
                for new, old in zip(trace.tensors, before.tensors, strict=True)
            ),
        )

    def bound(self, trace: Trace, state: int) -> int | None:
        """The limit for `trace`, the last pass's, if so many bytes of state stay and not as many as then."""
        if self._budget.limit is None:
            return None
        bound = self._budget.planned(0) - self._kept_state.more_than_held(state)
        return bound if state else max(bound, floor(trace)[0])

    def make(self, trace: Trace, link: Link, limit: int | None) -> Plan:
        """The plan for `trace` over this link, within `limit` bytes."""
        return make_plan(
            trace,
            link,
            limit=limit,
            budget=self._saved.most,
            prefetch=self._prefetch,
            write_ahead=self.write_ahead,
            write_early=self._write_early,
        )

    def plan(self, trace: Trace, *, early: bool, make_room: Callable[[], bool]) -> Plan | None:
        """The plan for `trace`.

        If the limit is below its floor, `make_room` may give up something else; there is no plan then. Otherwise a
        training that is past its beginning, not `early`, goes on with the plan that needs the least. Raises LimitError
        if an early one cannot keep the limit.
        """
        asked = self._budget.limit
        limit, lowest = None, 0
        if asked is not None:
            lowest = floor(trace)[0]
            if lowest > asked and make_room():
                return None
            if lowest > asked and early:
                lowest = asked
            elif lowest > asked and not self._warned:
                self._warned = True
                warn_script(
                    f"the limit of {format_size(asked)} cannot be kept any more: {format_size(lowest)} are needed "
                    "with every saved tensor swapped; training goes on with as little as that"
                )
            limit = self._budget.planned(lowest)
            fits = plain_peak(trace) <= limit
        else:
            fits = max(trace.live, default=0) <= (self._saved.most or 0)
        # Nothing will move over it, so its figures do not matter and measuring it would cost the user time.
        link = Link("none needed", 1e9, 1e9) if fits else self.link()
        return replace(self.make(trace, link, limit), limit=asked)
