"""The pass under way: each access is recorded, and the stepper decides by a plan or, while none is known, by a rule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import islice

from lms.core.guide import Guide, Key
from lms.core.items import State
from lms.core.recompute import AT_ONCE
from lms.core.stepper import Stepper
from lms.core.trace import AccessKind
from lms.core.turns import Rounds, Turns
from lms.runtime.recorder import Finished, Label, Recorder
from lms.torch.mover import Mover
from lms.torch.native_hooks import Led
from lms.torch.records import LiveRecord

_LOOKED_AT = 16  # records that the forward may still have, at each save: the time for all would grow with a square


class Pass:
    """From the first live record until none is live, or until only old ones are (`lms.core.turns`)."""

    def __init__(
        self,
        stepper: Stepper[LiveRecord],
        mover: Mover,
        recorder: Recorder,
        guide: Guide | None,
        *,
        choose: Callable[[list[Key]], Guide | None],
        rounds: Rounds,
    ) -> None:
        self.stepper = stepper
        self.recorder = recorder
        self.guide = guide
        self.live = 0  # records that autograd holds a handle on
        self.turns = Turns(rounds)
        self._choose = choose
        self._forward = True  # no record has been used yet
        self._shared: dict[int, LiveRecord] = {}  # by index: saved by the forward, and held by others since
        self._mover = mover
        self._before = replace(mover.counters)
        mover.log = recorder.copies
        stepper.begin(guide.course if guide is not None else None)

    @property
    def records(self) -> dict[int, LiveRecord]:
        """By index; the dead ones too. While C++ leads, only those that move."""
        return self.stepper.items

    def add(self, record: LiveRecord, describe: Callable[[], Label]) -> None:
        """A record is saved for the first time. `describe` is called unless a well-known plan tells the label."""
        guide, label = self.guide, None
        if guide is not None and guide.expects(self.recorder.position, ("write", record.index, record.nbytes)):
            record.pinned = guide.pinned[record.index]
            if not self.recorder.measure:
                label = guide.labels[record.index]
        self.live += 1
        self.recorder.new(record.nbytes, label or describe(), pinned=record.pinned)
        self.stepper.add(record)

    def save(self, record: LiveRecord, *, writes: bool) -> None:
        """The forward saves a view of `record`. `writes` says whether its bytes are new."""
        self.turns.save(record.index)
        if self.recorder.measure and self._forward:
            self._look_who_keeps(record)
        self._step("write" if writes else "hold", record)

    def use(self, record: LiveRecord, backward: int) -> None:
        """The backward of this number uses `record`, which is on the device. It may leave again."""
        self.turns.use(record.index, backward)
        self._step("read", record)

    def free(self, record: LiveRecord) -> None:
        """The last handle on `record` is gone."""
        self._note_end(record.index)
        self.stepper.holdings.free(record)

    def _note_end(self, record: int) -> None:
        self.live -= 1
        self.turns.free(record)
        self.recorder.freed[record] = self.recorder.position

    def take_turn(self, *, in_backward: bool) -> bool:
        """Whether a save that comes now is the first of another pass, although records of this one are live.

        So it is if this pass is not recorded any more: it is too long, or an error has left a hook.
        """
        return not in_backward and (self.turns.take_turn() or self.recorder.truncated)

    def require(self, record: LiveRecord) -> None:
        """The backward needs `record`: make it resident, whatever it takes."""
        if self._forward:
            self._forward = False
            for kept in self._shared.values():  # until the forward's end, at least
                self._note_let_go(kept)
            self._shared.clear()
        self.stepper.require(record)

    def hand_over(self) -> None:
        """C++ leads this pass from here on. Python learns only of what moves, until it takes over."""
        assert self.guide is not None
        self.recorder.foresee(self.guide.sizes, self.guide.labels, self.guide.pinned)

    def take_over(self, led: Led) -> dict[int, LiveRecord]:
        """Go on with a pass that C++ has led so far; its records. Empty if the pass is over and was as planned.

        All accesses so far were as planned, so each is noted now. If the pass is over, the plan tells what happened.
        """
        recorder, guide, stepper = self.recorder, self.guide, self.stepper
        assert guide is not None
        moving, holdings = stepper.items, stepper.holdings
        held_peak = max(holdings.held_peak, led.held_peak)
        recorder.marks += led.marks
        recorder.held += led.held
        recorder.cut(len(led.freed))
        facts = zip(recorder.pinned, led.owned, led.freed, strict=True)
        recorder.pinned[:] = [
            mine if freed < 0 or index in moving else owned for index, (mine, owned, freed) in enumerate(facts)
        ]
        if len(led.tasks) == len(guide.keys) and -1 not in led.freed:
            recorder.kinds, recorder.order = [key[0] for key in guide.keys], [key[1] for key in guide.keys]
            recorder.freed = led.freed
            holdings.held_peak = held_peak
            return {}
        stepper.items = {}
        stepper.skip_to(len(led.tasks), 0)
        ends: dict[int, list[int]] = defaultdict(list)
        for index, position in enumerate(led.freed):
            ends[position].append(index)
        for position in range(len(led.tasks) + 1):
            for index in ends[position]:
                self._note_end(index)
                if index not in moving:
                    holdings.free(stepper.items[index])
            if position == len(led.tasks):
                break
            kind, index, nbytes = guide.keys[position]
            if kind == "write" and index not in stepper.items:
                record = moving.get(index) or LiveRecord(index, (), nbytes)
                record.pinned = guide.pinned[index]
                stepper.add(record)
                self.live += 1
            if kind != "read":
                self.turns.save(index)
            else:
                self.turns.use(index, led.tasks[position])
                if index not in moving:
                    self.require(stepper.items[index])
            recorder.access(kind, index)
        holdings.evictable = dict(sorted(holdings.evictable.items()))  # as if they had come in their order
        holdings.held_peak = held_peak
        return stepper.items

    def finish(self) -> Finished:
        """No record is live."""
        counters = self._mover.counters.since(self._before)
        self.recorder.finish(counters.stall_out + counters.stall_in + counters.hook)
        guide = self.guide
        whole = guide is not None and self.recorder.position == len(guide.keys)
        finished = Finished(
            self.recorder,
            guide if whole else None,
            counters,
            self.stepper.holdings.held_peak,
            guide.plan if guide is not None and whole else None,
        )
        self.stepper.begin(None)
        return finished

    def _look_who_keeps(self, new: LiveRecord) -> None:
        """Note which records the forward let go of since the last save. Moving one earlier would have freed nothing.

        If it has many, each is looked at in its turn. It then seems to be held for longer than it was.
        """
        for record in list(islice(self._shared.values(), _LOOKED_AT)):
            del self._shared[record.index]
            if record.state is State.HERE and record.flat is None and record.kept_by_others:
                self._shared[record.index] = record  # behind the others
            else:
                self._note_let_go(record)
        self._shared[new.index] = new

    def _note_let_go(self, record: LiveRecord) -> None:
        recorder = self.recorder
        if not recorder.truncated and recorder.position - recorder.last_save[record.index] > AT_ONCE:
            recorder.let_go[record.index] = recorder.position

    def _step(self, kind: AccessKind, record: LiveRecord) -> None:
        recorder, guide = self.recorder, self.guide
        position = recorder.position
        recorder.access(kind, record.index)
        if guide is not None and recorder.truncated:
            # Accesses have no number from here on, so no plan can be followed.
            self.guide = None
            self.stepper.divert(None)
        elif guide is not None and not guide.expects(position, (kind, record.index, record.nbytes)):
            # Another plan that began as this pass did, or none.
            self.guide = guide = self._choose(recorder.keys())
            self.stepper.divert(guide.course if guide is not None else None)
        self.stepper.access(record, read=kind == "read")
