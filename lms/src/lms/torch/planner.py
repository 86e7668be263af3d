"""From finished passes to guides for the passes to come: keeps the traces, makes the plans, refines them."""

from __future__ import annotations

import platform
import statistics
import warnings
from dataclasses import replace

import torch

from lms.errors import LimitError
from lms.link import Link
from lms.link.host import kernel
from lms.plan import Plan, make_plan, plain_peak
from lms.tiers.device import Device
from lms.torch.engine import Engine
from lms.torch.guide import Guide, Key
from lms.torch.passes import Finished
from lms.torch.recorder import Recorder
from lms.trace import Trace
from lms.units import format_size

MOST_GUIDES = 64  # plans kept for as many shapes; the one that was used longest ago goes
REFINED_AFTER = (1, 3)  # passes that followed a plan, after which it is made anew from better measurements
CALIBRATION = 256 * 10**6  # bytes written and read when a link must be known before anything was moved


class PassPlanner:
    """Knows one plan for each sequence of accesses seen, and how much may stay while none is known."""

    def __init__(
        self,
        device: Device,
        engine: Engine,
        *,
        limit: int | None,
        budget: int | None,
        prefetch: int | None,
        write_ahead: int | None,
    ) -> None:
        self.device = device
        self.engine = engine
        self.limit = limit
        self.fixed_budget = budget
        self.prefetch = prefetch
        self.write_ahead = write_ahead
        self.news: list[Plan] = []  # new plans that nobody was told of yet
        self.guides: list[Guide] = []  # most recently used last
        self.current: Guide | None = None  # of the last complete pass
        self.last: Finished | None = None
        self.passes = 0
        self.replans = 0
        self.peak = 0
        self.held_peak = 0
        self._warned = False
        self._next: Guide | None = None  # that the pass under way began with
        self._unmeasured = False  # a pass diverged whose memory was not measured
        self._refused: LimitError | None = None
        self._recorder: Recorder | None = None
        self._worst = 0  # what LMS does not hold, at most, in the last pass that was measured
        self._largest = 0
        self._margin = 0  # what earlier plans' real peaks went over the limit

    # What the swapper asks

    def choose(self, keys: list[Key]) -> Guide | None:
        """The guide for a pass that begins with `keys`. Raises LimitError when the last pass was refused a plan."""
        if self._refused is not None:
            refused, self._refused = self._refused, None
            raise refused
        found = next((guide for guide in reversed(self.guides) if guide.began_like(keys)), None)
        if found is not None:
            self.guides.remove(found)
            self.guides.append(found)
        if len(keys) == 1:
            self._next = found
        return found

    def budget(self, largest: int) -> int:
        """Bytes that may stay in a pass without a plan whose largest record so far has `largest` bytes."""
        if self.fixed_budget is not None:
            return self.fixed_budget
        assert self.limit is not None
        worst = max(self._worst, self._recorder.worst if self._recorder is not None else 0)
        # The next operation may make one record and need another's worth of scratch before it can be measured.
        return max(0, self.limit - self._margin - worst - 2 * max(largest, self._largest))

    def recorder(self, present: int) -> Recorder:
        """A recorder for the pass that begins. Early passes measure memory too; later ones only time."""
        settled = self._next is not None and self._next.passes > max(REFINED_AFTER) and not self._unmeasured
        self._recorder = Recorder(
            self.device, measure=not settled, timed=self.device.name == "cpu" or not settled, present=present
        )
        return self._recorder

    # What the session asks

    @property
    def trace(self) -> Trace | None:
        """The pass that the current plan was made for."""
        return self.current.trace if self.current is not None else None

    @property
    def plan(self) -> Plan | None:
        """The current plan."""
        return self.current.plan if self.current is not None else None

    def note(self, finished: Finished) -> None:
        """Learn from a complete pass."""
        recorder = finished.recorder
        self.passes += 1
        self.peak = max(self.peak, recorder.peak)
        self.held_peak = max(self.held_peak, finished.counters.held_peak)
        self._largest = max([self._largest, *recorder.nbytes])
        if recorder.truncated or "use" not in recorder.kinds:
            return  # it never ended, or nobody went backward: nothing to plan for
        self._worst = recorder.worst or self._worst
        self.last = finished
        if finished.guide is None:
            self._learn(finished)
        else:
            self._refine(finished.guide, finished)

    def link(self) -> Link:
        """The link to the tier below, measured on what was moved, or else by moving something now."""
        return self.engine.link() or self.engine.calibrate(CALIBRATION)

    # Plans

    def _learn(self, finished: Finished) -> None:
        recorder = finished.recorder
        # Without knowing what the rest of the device needs, no plan can keep a limit: measure the next one.
        self._unmeasured = self.limit is not None and not recorder.measure
        if self._unmeasured:
            return
        trace = self._trace(recorder)
        try:
            plan = self._plan(trace)
        except LimitError as refused:
            if self.guides:
                self._warn(f"a pass of another shape has no plan: {refused}")
            else:
                self._refused = refused
            return
        self.replans += bool(self.guides)
        self.current = Guide(recorder.keys(), trace, plan)
        self.current.margin = self._margin
        self.guides.append(self.current)
        del self.guides[:-MOST_GUIDES]
        self.news.append(plan)

    def _refine(self, guide: Guide, finished: Finished) -> None:
        recorder = finished.recorder
        self.current = guide
        guide.passes += 1
        if recorder.timed and guide.passes <= max(REFINED_AFTER):
            guide.samples.append(recorder.gaps())
        over = recorder.peak - self.limit if self.limit is not None and recorder.measure else 0
        if over > 0 and guide.plan.moves:
            self._margin = max(self._margin, guide.margin + over)
        elif guide.passes not in REFINED_AFTER:
            return
        trace = self._trace(recorder)
        if guide.samples:
            gaps = [statistics.median(column) for column in zip(*guide.samples, strict=True)]
        else:
            gaps = [*(access.seconds for access in guide.trace.accesses), guide.trace.tail]
        measured = trace if recorder.measure else guide.trace
        trace = replace(
            trace,
            accesses=tuple(
                replace(access, seconds=gap, other=seen.other)
                for access, gap, seen in zip(trace.accesses, gaps, measured.accesses, strict=False)
            ),
            tail=gaps[-1],
            tail_other=measured.tail_other,
            records=tuple(
                replace(new, module=old.module, let_go=new.let_go if new.let_go is not None else old.let_go)
                for new, old in zip(trace.records, guide.trace.records, strict=True)
            ),
        )
        try:
            plan = self._plan(trace)
        except LimitError as refused:
            self._warn(f"the plan in use stays, though {refused}")
            return
        self.replans += plan.moves != guide.plan.moves
        guide.trace = trace
        guide.margin = self._margin
        guide.follow(plan)

    def _warn(self, what: str) -> None:
        """Say once what a training that has begun is not ended for."""
        if not self._warned:
            self._warned = True
            warnings.warn(what, RuntimeWarning, stacklevel=2)

    def _trace(self, recorder: Recorder) -> Trace:
        link = self.engine.link()
        return recorder.trace(self.device.capacity(), link.to_dict() if link is not None else {}, machine())

    def _plan(self, trace: Trace) -> Plan:
        limit = None if self.limit is None else self.limit - self._margin
        if self.fixed_budget is not None:
            fits = max(trace.live, default=0) <= self.fixed_budget
        else:
            fits = plain_peak(trace) <= (limit or 0)
        # Nothing will move over it, so its figures do not matter and measuring it would cost the user time.
        link = Link("none needed", 1e9, 1e9) if fits else self.link()
        try:
            plan = make_plan(
                trace,
                link,
                limit=limit,
                budget=self.fixed_budget,
                prefetch=self.prefetch,
                write_ahead=self.write_ahead,
            )
        except LimitError as refused:
            if self._margin:
                raise LimitError(f"{refused} (the limit given is {format_size(self.limit or 0)})") from None
            raise
        return replace(plan, limit=self.limit)


def machine() -> dict[str, str]:
    """What the figures were measured on."""
    return {
        "system": f"{platform.system()} {kernel()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
    }
