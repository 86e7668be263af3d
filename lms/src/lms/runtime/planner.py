"""From finished passes to guides for the passes to come: keeps the traces, has plans made, refines them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

from lms.core.budget import Budget, Client
from lms.core.guide import Guide, Key, prefixes
from lms.core.plan import Choice, Plan, floor
from lms.core.recompute import Candidate, choose
from lms.core.simulate import simulate
from lms.core.timeline import Timeline
from lms.core.trace import Trace
from lms.errors import LimitError
from lms.memory.device import Device
from lms.runtime.guides import Guides, SeenSequences
from lms.runtime.kept_state import KeptState
from lms.runtime.peaks import Peaks
from lms.runtime.plan_maker import PlanMaker, Tier
from lms.runtime.progress import Progress
from lms.runtime.recorder import Finished, Recorder
from lms.units import format_size

TIMED_EVERY = 16  # one pass in 16 is timed, so that reports stay current
MOST_UNSEEN = 8  # sequences in a row that were new: from then on a plan is made for those alone that come again
REFINED_AFTER = (1, 3)  # passes that followed a plan, after which it is made again from better measurements
_ROOMY = 0.75  # of the limit: while all passes stay under it, new shapes are not measured


class PassPlanner:
    """Knows a plan for each sequence of accesses seen, and how much may stay while none is known.

    The bytes beside the saved tensors change from pass to pass: the optimizer's state comes with the first step,
    gradients with the first of several accumulated passes. So a plan under a limit is good for a pass that begins with
    as many bytes *outside* as the recorded one did. For another amount it is made again.

    `state` is the optimizers', if that may leave between two passes. The keywords are PlanMaker's.
    """

    def __init__(
        self,
        device: Device,
        tier: Tier,
        budget: Budget,
        saved: Client,
        state: Client,
        *,
        prefetch: int | None,
        write_ahead: int | None,
        write_early: bool = True,
        facts: Mapping[str, str],
    ) -> None:
        self.device = device
        self._tier = tier
        self.budget = budget
        self.limit = budget.limit
        self.client = saved
        self.kept_state = KeptState(state)
        self.progress = Progress(device)
        self.peaks = Peaks(device, budget, self.progress)
        self.maker = PlanMaker(
            device,
            tier,
            budget,
            saved,
            self.kept_state,
            self.peaks,
            prefetch=prefetch,
            write_ahead=write_ahead,
            write_early=write_early,
            facts=facts,
        )
        self.news: list[Plan] = []  # new plans that were not reported yet
        self.guides = Guides(budget)
        self.current: Guide | None = None  # of the last complete pass
        self.last: Finished | None = None
        self.last_timed: Finished | None = None
        self.replans = 0
        self.held_peak = 0
        self._far_below_limit = False  # the last pass moved nothing and stayed far below the limit
        self._measure_next = False  # the next passes must be measured
        self._seen = SeenSequences()
        self._curious: set[Key] = set()  # the next pass that begins with one of these must be measured
        self._refused: LimitError | None = None
        self._unsuited: tuple[Guide, int] | None = None  # the guide needs a variant for so many bytes outside
        self._recorder: Recorder | None = None
        self._beside = 0  # bytes beside the saved tensors when the pass under way began
        self.above = 0  # what came on top of that, at most, in the last pass that was measured
        self.choice: Choice | None = None  # of modules that are recomputed, once it is made

    # For the swapper

    def begin(self, key: Key, present: int) -> tuple[Guide | None, Recorder]:
        """The guide (if there is one) and the recorder for the pass that begins with `key`.

        `present` bytes of saved tensors are on the device already. Raises LimitError if the passes so far have shown
        that the limit cannot be kept.
        """
        self._plan_for_unsuited()  # the pass before, which could not wait for it
        self.progress.begin_pass()
        too_much = self.peaks.before_a_pass()
        refused, self._refused = self._refused or too_much, None
        if refused is not None:
            raise refused
        self.kept_state.begin_pass()
        if self.limit is not None:
            self.client.held = present
            self.budget.measure(self.device.current())
            self._beside = self.budget.beside(self.client)
        guide = self.choose([key]) or self._plan_for_unsuited()
        known = guide.passes > max(REFINED_AFTER) if guide is not None else self._far_below_limit
        curious = self._measure_next or key in self._curious
        measure = self.progress.early or curious or self.peaks.exceeded_lately or not known
        passes = guide.passes if guide is not None else self.progress.passes
        timed = measure or passes % TIMED_EVERY == 0 or (guide is not None and guide.drift.suspected)
        self._recorder = Recorder(self.device, measure=measure, timed=timed, present=present)
        return guide, self._recorder

    def choose(self, keys: list[Key]) -> Guide | None:
        """The guide for a pass that has begun with `keys`; None if no pass has begun like that before.

        It makes no plan, so that it can be asked in the middle of a pass. If the guides for such a pass are for other
        amounts of memory outside, the pass has none, and `begin` plans before the next one.
        """
        like = self.guides.beginning(keys)
        suited = self.guides.suited(like, self._beside) if like is not None else None
        if suited is not None:
            self.guides.use(suited)
        else:
            self._unsuited = (like, self._beside) if like is not None else None
        return suited

    def room(self, largest: int) -> int:
        """Bytes that may stay in a pass without a plan, if its largest record so far has `largest` bytes."""
        worst = max(self._beside + self.above, self._recorder.worst if self._recorder is not None else 0)
        # The next operation may make one record and need another's worth of scratch before it can be measured.
        return self.budget.room(self.client, worst, spare=2 * max(largest, self.client.needed))

    # For the session

    @property
    def trace(self) -> Trace | None:
        """The pass that the current plan was made for."""
        return self.current.trace if self.current is not None else None

    @property
    def plan(self) -> Plan | None:
        """The current plan."""
        return self.current.plan if self.current is not None else None

    @property
    def refined(self) -> bool:
        """Whether the current plan has the times of all passes that it is made again from.

        Those of the pass that it was made from say less: kernels may be loaded in it, and memory touched first.
        """
        return self.current is not None and self.current.passes >= max(REFINED_AFTER) and bool(self.current.samples)

    @property
    def undisturbed(self) -> Trace | None:
        """The same pass as `trace`, each stretch of it with the least of the times that it took.

        A full GPU's allocator now and then unmaps memory and maps it elsewhere. That looks like computation, and is no
        part of what a module takes that runs again.
        """
        guide = self.current
        if guide is None or not guide.samples:
            return self.trace
        least = [min(column) for column in zip(*guide.samples, strict=True)]
        return guide.trace.with_measured(least, guide.trace.others)

    @property
    def timed(self) -> tuple[Trace, Timeline, Plan | None] | None:
        """The last pass that was timed, how it ran, and the plan that it followed."""
        last = self.last_timed
        if last is None:
            return None
        trace = last.guide.trace if last.guide is not None else self.maker.trace(last.recorder)
        return trace, last.recorder.timeline(), last.plan

    def note(self, finished: Finished) -> None:
        """Learn from a complete pass."""
        recorder = finished.recorder
        trained = "read" in recorder.kinds
        self.progress.end_pass(trained=trained)
        self.peaks.after_a_pass(recorder)
        self.held_peak = max(self.held_peak, finished.held_peak)
        self.client.needed = max([self.client.needed, *recorder.nbytes])
        if recorder.truncated or not trained:
            return  # it never ended, or had no backward: there is nothing to plan for
        if recorder.measure:
            self.above = max(0, recorder.worst - recorder.other[0])
            self.budget.proven |= finished.counters.out > 0
        self.last = finished
        if recorder.timed:
            self.last_timed = finished
        self.client.wanted = max(self.client.wanted, recorder.movable)
        self._far_below_limit = not finished.counters.out and (
            self.limit is None or recorder.peak <= _ROOMY * self.limit
        )
        self._measure_next = False
        if finished.guide is not None:
            self._refine(finished.guide, finished)
            return
        keys = recorder.keys()
        beginnings = prefixes(keys)
        if not self.guides.continues(beginnings):  # else it was cut short, by an exception or by Ctrl-C
            self._learn(finished, keys, known=self._seen.note(beginnings[-1]))

    def measure_next(self) -> None:
        """Have the next pass measured and planned for, however well it or its like is known."""
        self._measure_next = True
        self._seen.new_in_a_row = 0

    def choose_modules(self, candidates: Sequence[Candidate]) -> Choice:
        """Choose among the `candidates`, measured in the last pass, those that are recomputed from the next pass on.

        That pass has another sequence of accesses, so it is recorded and planned for as any new one.
        """
        trace, link = self.undisturbed, self.maker.link()
        assert trace is not None

        @cache
        def beside(state: int) -> Choice:
            return choose(trace, link, candidates, limit=self.maker.bound(trace, state), budget=self.client.most)

        if self.limit is not None:
            self.kept_state.decide(link, lambda state: beside(state).seconds)
        choice = beside(self.kept_state.nbytes)
        self.above += choice.recomputed  # while no plan is known, the rule leaves room for it
        self.measure_next()
        self.tell_choice(choice)
        return choice

    def tell_choice(self, choice: Choice) -> None:
        """From now on this choice holds; the plan at hand tells of it."""
        self.choice = choice
        if self.current is not None:
            told = replace(self.current.plan, choice=choice)
            if not choice.modules:  # else the next plan will be the first that is made for it
                self.current.plan = told
            self.news.append(told)

    # Plans

    def _learn(self, finished: Finished, keys: Sequence[Key], *, known: bool) -> None:
        """Plan for the pass that ended, if a pass like it is likely to come and gains by a plan."""
        recorder = finished.recorder
        if recorder.measure:
            self._curious.discard(keys[0])
        current = self.current
        shown = (
            current is not None
            and (not recorder.measure or recorder.movable <= current.trace.saved)
            and current.plan.choice is self.choice
        )
        fits = shown and not finished.counters.out and self.budget.fits(recorder.peak)
        if fits and not (known and self._is_worth_a_guide(keys, recorder)):
            return  # it needs no plan, and the one that is shown is of a larger pass
        if not known and self._seen.new_in_a_row > MOST_UNSEEN and current is not None and not self.progress.early:
            return  # most likely it will not come again
        # Without knowing what the rest of the device needs, no plan can keep a limit: measure the next one.
        self._measure_next = self.limit is not None and not recorder.measure
        if self._measure_next:
            return
        self._add(keys, self.maker.trace(recorder), shown=not fits)

    def _is_worth_a_guide(self, keys: Sequence[Key], recorder: Recorder) -> bool:
        """Whether C++ is to lead passes like this one, in which everything fits. The pass must have been measured."""
        if not self.guides.has_place_for(keys[0]):
            return False
        if self.limit is not None and not recorder.measure:
            self._curious.add(keys[0])
            return False
        return True

    def _add(self, keys: Sequence[Key], trace: Trace, *, shown: bool = True) -> Guide | None:
        """Plan for `trace`, and keep the plan for the next pass like it; None if there can be no plan."""
        plan = self._plan(trace)
        if plan is None:
            return None
        new = Guide(keys, trace, plan)
        new.margin, new.proven = self.budget.margin, self.budget.proven
        new.shown = shown
        if shown:
            self.replans += len(self.guides) > 0
            self.current = new
            self.news.append(plan)
        self.guides.add(new)
        return new

    def _plan_for_unsuited(self) -> Guide | None:
        """A new guide for the bytes outside now, if `choose` found none. None if no plan is known to keep the limit."""
        if self._unsuited is None:
            return None
        (found, outside), self._unsuited = self._unsuited, None
        # Which of the passes this one will be like is not known, so it is planned for the most of them.
        grown = (
            [other + outside - guide.outside for other in guide.trace.others]
            for guide in self.guides.variants(found) or [found]
        )
        trace = found.trace.with_measured(found.trace.times, [max(column) for column in zip(*grown, strict=True)])
        if floor(trace)[0] > (self.limit or 0) and self.progress.early:
            return None  # an estimate is no reason to end the training: the rule leads, and the pass is measured
        new = self._add(found.keys, trace)
        if new is not None:
            new.usual = found.usual
        return new

    def _refine(self, guide: Guide, finished: Finished) -> None:
        recorder = finished.recorder
        if guide.shown:
            self.current = guide
        guide.passes += 1
        if recorder.timed and not recorder.slowed and guide.passes <= max(REFINED_AFTER):
            guide.samples.append(recorder.gaps())
        over = recorder.in_use_peak - (self.limit or 0) if recorder.measure and self.limit is not None else 0
        if over > 0 and (self.limit or 0) - guide.margin - self.budget.reserve <= guide.plan.floor:
            self._give_up(recorder, over)
            over = 0
        drift = self._drifted(guide, finished)
        grown = bool(guide.plan.moves) and self.budget.proven and not guide.proven  # the plan may use more by now
        if over <= 0 and guide.passes not in REFINED_AFTER and not drift and not grown:
            return
        trace = self.maker.measured_again(guide, recorder)
        if over > 0:
            # The trace has what the plan did not know. A margin is needed only for errors that the plan would repeat.
            most_held = guide.plan.forecast.held_peak
            foreseen = simulate(trace, guide.plan, self.maker.link(), most_held=most_held).resident_peak
            self.budget.margin = max(self.budget.margin, guide.margin + min(over, recorder.in_use_peak - foreseen))
        plan = self._plan(trace)
        if plan is None:
            return
        if plan.moves and self.limit is not None and self.kept_state.is_undecided:
            link = self.maker.link()
            self.kept_state.decide(
                link, lambda state: self.maker.make(trace, link, self.maker.bound(trace, state)).forecast.seconds
            )
        self.replans += plan.moves != guide.plan.moves
        guide.margin, guide.proven = self.budget.margin, self.budget.proven
        if drift:
            plan = replace(plan, drift=drift)
            self.news.append(plan)
        usual = statistics.median(map(sum, guide.samples)) if guide.samples else guide.usual
        guide.follow(trace, plan, usual)
        if plan.moves and not guide.shown:
            guide.shown, self.current = True, guide
            self.news.append(plan)

    def _drifted(self, guide: Guide, finished: Finished) -> str:
        """What takes another time by now than the guide's plan assumed; "" if nothing does, or that is not sure yet."""
        drift, recorder = self._read_times(guide), finished.recorder
        timed = recorder.timed and not recorder.slowed and guide.passes > max(REFINED_AFTER)
        if not drift and guide.unread is None and timed:
            guide.unread = recorder
            drift = self._read_times(guide)
        return drift

    def _read_times(self, guide: Guide) -> str:
        timed = guide.unread
        if timed is None or not self.device.reached(timed.marks[-1]):
            return ""  # a GPU is behind: its times are read after a later pass, so that nothing waits for it
        guide.unread = None
        drift = guide.drift.note(
            guide.passes, guide.trace, guide.plan, self._tier.link(), timed.gaps(), usual=guide.usual
        )
        if drift:
            guide.samples = list(guide.drift.samples)
            guide.drift.settle(guide.passes)
        return drift

    def _give_up(self, recorder: Recorder, over: int) -> None:
        """The pass went over the limit by `over` bytes although everything that can leave had left."""
        if over > self.budget.reserve and self._make_room():
            return
        if self.progress.early and over > self.budget.reserve:
            self._refused = LimitError(
                f"limit {format_size(self.limit or 0)} cannot be kept: with every saved tensor swapped that can be, "
                f"the peak was {format_size(recorder.in_use_peak)} in module {recorder.peak_module!r}. Raise the limit "
                f"to {format_size(recorder.in_use_peak * 1.02)} or more"
            )

    def _plan(self, trace: Trace) -> Plan | None:
        """The plan for `trace`; None if the limit is below its floor and the training will be ended for that."""
        try:
            plan = self.maker.plan(trace, early=self.progress.early, make_room=self._make_room)
        except LimitError as refused:
            self._refused = refused
            return None
        return replace(plan, choice=self.choice) if plan is not None else None

    def _make_room(self) -> bool:
        """Keep no state any more, or recompute nothing: they may need the memory that is missing. Whether any does."""
        if self.kept_state.give_up(self.progress.steps):
            return True
        if self.choice is None or not self.choice.modules:
            return False
        self.tell_choice(Choice("none: the modules that were recomputed need more memory than the limit leaves"))
        return True
