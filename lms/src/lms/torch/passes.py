"""The pass under way: each access in turn, moved by a plan or, while none is known, by a rule.

The rule: evict the oldest record first, bring the newest back first, within the budget. Autograd works as a stack, so
the oldest record is the one needed last.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from lms.core.guide import Guide, Key
from lms.core.turns import Rounds, Turns
from lms.runtime.recorder import Recorder
from lms.torch.mover import Counters, Mover
from lms.torch.records import LiveRecord, State

AT_ONCE = 2  # accesses after its save at which the forward lets go of most records
AHEAD = 4  # records that the rule brings back ahead of their use


@dataclass
class Finished:
    """A complete pass, for the planner to learn from."""

    recorder: Recorder
    guide: Guide | None  # the plan for just this sequence of accesses; None when none is known
    counters: Counters
    seconds: float


class Pass:
    """From the first live record until none is live, or until only old ones are (`lms.core.turns`).

    The steps of an access are those of `lms.core.schedule`.
    """

    def __init__(
        self,
        mover: Mover,
        recorder: Recorder,
        guide: Guide | None,
        *,
        budget: Callable[[int], int],
        choose: Callable[[list[Key]], Guide | None],
        write_ahead: int | None,
        rounds: Rounds,
    ) -> None:
        self.mover = mover
        self.recorder = recorder
        self.guide = guide
        self.records: list[LiveRecord] = []  # by index; the dead ones too
        self.live = 0  # records that autograd holds a handle on
        self.turns = Turns(rounds)
        self.largest = 0
        self._budget = budget
        self._choose = choose
        self._write_ahead = write_ahead
        self._late = False  # it diverged from its plan; `guide` is another one, or none
        self._returned = 0  # into guide.returns
        self._drops: list[int] = []  # clean records to drop at the next access
        self._forward = True  # no record has been used yet
        self._kept: list[LiveRecord] = []  # saved by the forward, and held by others since
        self._started = time.perf_counter()
        self._before = mover.counters.copy()
        mover.counters.held_peak = mover.held
        mover.log = recorder.copies

    def add(self, record: LiveRecord, label: tuple[str, str, tuple[int, ...]]) -> None:
        """A record is saved for the first time."""
        position = self.recorder.position
        guide = self.guide
        if guide is not None and guide.expects(position, ("save", record.index, record.nbytes)):
            record.pinned = guide.pinned[record.index]
        self.records.append(record)
        self.live += 1
        self.recorder.new(record.nbytes, label, pinned=record.pinned)
        if not record.pinned:
            self.largest = max(self.largest, record.nbytes)
            self.mover.hold(record)

    def save(self, record: LiveRecord) -> None:
        """The forward saves a view of `record`."""
        self._drop_due()
        self.turns.save(record.index)
        if self.recorder.measure and self._forward:
            self._look_who_keeps(record)
        self._step("save", record)

    def use(self, record: LiveRecord, backward: int) -> None:
        """The backward of this number uses `record`, which was brought. It may leave again."""
        self.turns.use(record.index, backward)
        self._step("use", record)

    def free(self, record: LiveRecord) -> None:
        """The last handle on `record` is gone."""
        self.live -= 1
        self.turns.free(record.index)
        self.recorder.freed[record.index] = self.recorder.position
        self.mover.free(record)

    def take_turn(self, *, in_backward: bool) -> bool:
        """Whether a save that comes now is the first of another pass, although records of this one are live.

        So it is if this pass is not recorded any more: it is too long, or an error has left a hook.
        """
        return not in_backward and (self.turns.take_turn() or self.recorder.truncated)

    def bring(self, record: LiveRecord) -> None:
        """The backward needs `record`: make it resident, whatever it takes."""
        if self._forward:
            self._forward = False
            for kept in self._kept:  # until the forward's end, at least
                self._note_let_go(kept)
            self._kept.clear()
        self._drop_due()
        guide, position = self.guide, self.recorder.position
        foreseen = guide is not None and (record.index, position) in guide.on_demand
        self._bring(record, foreseen=foreseen)

    def bring_left(self, record: LiveRecord) -> None:
        """The backward needs `record`, which an earlier pass has left behind."""
        self._bring(record, foreseen=False)

    def _bring(self, record: LiveRecord, *, foreseen: bool) -> None:
        guide = self.guide
        cap = guide.plan.cap[min(self.recorder.position, len(guide.keys) - 1)] if guide is not None else self._room()
        self.mover.bring(record, cap, lambda: self._evict(record), foreseen=foreseen)

    def finish(self) -> Finished:
        """No record is live."""
        self.recorder.finish()
        guide = self.guide
        whole = guide is not None and self.recorder.position == len(guide.keys)
        return Finished(
            self.recorder,
            guide if whole else None,
            self.mover.counters.since(self._before),
            time.perf_counter() - self._started,
        )

    def _look_who_keeps(self, new: LiveRecord) -> None:
        """Note which records the forward let go of since the last save. Moving one earlier would have freed nothing."""
        kept = []
        for record in self._kept:
            if record.state is State.HERE and record.kept_by_others:
                kept.append(record)
            else:
                self._note_let_go(record)
        self._kept = kept if any(record is new for record in kept) else [*kept, new]

    def _note_let_go(self, record: LiveRecord) -> None:
        recorder = self.recorder
        if not recorder.truncated and recorder.position - recorder.saves[record.index][-1] > AT_ONCE:
            recorder.let_go[record.index] = recorder.position

    def _step(self, kind: str, record: LiveRecord) -> None:
        position = self.recorder.position
        self.recorder.access(kind, record.index)
        guide = self.guide
        if guide is not None and not guide.expects(position, (kind, record.index, record.nbytes)):
            guide = self._diverge(position)
        if guide is None:
            self._by_rule(kind, record)
        else:
            self._by_plan(guide, position, record)

    def _drop_due(self) -> None:
        """Clean drops that the access before asked for: its operation is over."""
        for index in self._drops:
            self.mover.drop(self.records[index])
        self._drops.clear()

    def _diverge(self, position: int) -> Guide | None:
        """Another plan that began as this pass did, with what it would have started by now; or none."""
        self.guide = guide = self._choose(self.recorder.keys())
        self._late = True
        self._returned = 0
        if guide is not None:
            for earlier in range(position):
                for move in guide.starts.get(earlier, ()):
                    self.mover.send(self.records[move.record])
        return guide

    def _by_plan(self, guide: Guide, position: int, record: LiveRecord) -> None:
        mover = self.mover
        for move in guide.starts.get(position, ()):
            if move.write:
                mover.send(self.records[move.record])
            else:
                self._drops.append(move.record)
        cap = guide.plan.cap[position]
        if mover.held - mover.left > max(cap, guide.plan.forecast.held_peak):
            self._late = True  # records live longer than they did (retain_graph): make room by the rule
        mover.make_room(cap, lambda: self._evict(record), ahead=guide.plan.write_ahead)
        returns = guide.returns
        while self._returned < len(returns) and returns[self._returned].fetch <= position:
            move = returns[self._returned]
            comer = self.records[move.record]
            if comer.state is State.LEAVING:
                mover.keep(comer)  # not gone yet, so it stays
            elif comer.state is State.OUT and move.before > position:
                if mover.left:
                    mover.make_room(cap - comer.nbytes, lambda: self._evict(record))
                if mover.held + comer.nbytes > cap:
                    break
                mover.fetch(comer)
            self._returned += 1

    def _by_rule(self, kind: str, record: LiveRecord) -> None:
        mover, budget = self.mover, self._room()
        # What the forward saved just now can leave too: the operation at hand keeps it for as long as it needs it.
        in_hand = None if kind == "save" else record
        # Copies out start while some room is left, so that few are waited for.
        mark = budget - min(budget // 4, 4 * self.largest)
        while mover.held - mover.leaving > mark and self._evict(in_hand):
            pass
        mover.make_room(budget, lambda: self._evict(in_hand), ahead=self._write_ahead)
        if kind == "use":
            for index in range(record.index - 1, max(-1, record.index - 1 - AHEAD), -1):
                older = self.records[index]
                if older.state is State.OUT and not older.pinned:
                    if mover.held + older.nbytes > mark:
                        return
                    mover.fetch(older)

    def _room(self) -> int:
        """Bytes that may stay while no plan is known."""
        return self._budget(self.largest)

    def _evict(self, in_hand: LiveRecord | None) -> bool:
        """Have the oldest record leave that can and is not in hand: the backward needs it last. Whether one did.

        A pass that follows its plan has only those leave that earlier passes left behind.
        """
        evictable = self.mover.evictable
        if self.guide is not None and not self._late:
            return self.mover.evict([index for index in sorted(evictable) if index < 0], in_hand)
        # In the forward records come in the order of their indices; what the backward brought back lies behind them.
        return self.mover.evict(list(evictable) if self._forward else sorted(evictable), in_hand)
