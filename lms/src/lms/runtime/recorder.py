"""Recording of one pass: cheap appends while it runs, a Trace afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from time import perf_counter
from typing import Literal

from lms.core.guide import Guide
from lms.core.plan import Plan
from lms.core.timeline import Span, Timeline
from lms.core.trace import Access, AccessKind, Tensor, Trace
from lms.memory.device import Device, Mark, Peak
from lms.memory.transfer import Copy

Label = tuple[str, str, tuple[int, ...]]  # a record's module, dtype and shape


class Recorder:
    """The accesses of the pass under way, with a mark of the compute's time at the entry and exit of each hook.

    With `measure` the device's peak is read at each access too: what LMS does not hold is then known for every
    stretch of the pass, scratch memory inside single operations included.
    """

    MAX_ACCESSES = 1_000_000  # a pass that long never ends, because a graph is kept: its rest is not recorded

    def __init__(self, device: Device, *, measure: bool, timed: bool, present: int = 0) -> None:
        self.device = device
        self.measure = measure
        self.timed = timed
        self._watches = measure or timed  # else the order of accesses is all that is recorded
        self.kinds: list[AccessKind] = []
        self.order: list[int] = []  # the record of each access
        self.marks: list[Mark] = [device.mark()] if timed else []  # start, then entry and exit of each hook, end
        self.other: list[int] = []
        self.held: list[int] = []  # bytes held after each access
        self.first: list[int] = []  # for each record its first access, -1 before it
        self.last_save: list[int] = []
        self.freed: list[int] = []
        self.let_go: list[int | None] = []
        self.nbytes: list[int] = []
        self.pinned: list[bool] = []
        self.foreseen: list[bool] = []  # pinned, and known to be from the start
        self.slowed = False  # something else took time between hooks: its times are no measurement
        self.broken = False  # a hook was left by an error, so that entries and exits are out of step
        self._inside = False
        self.labels: list[Label] = []
        self.copies: list[tuple[Literal["out", "back"], int, Copy]] = []  # direction, record, copy
        self.peak = 0  # most bytes that the device held in this pass, as far as it was measured
        self.peak_at: int | None = None  # the access that it led to
        self.in_use_peak = 0  # the same without what the device only keeps for reuse
        self.worst = 0  # the largest of `other` so far
        if measure:
            device.reset_peak()
        self._began = perf_counter()
        self.seconds = 0.0  # length of the pass; 0 until it ends
        self._own = 0.0  # seconds of it that LMS has worked or waited
        self._present = present  # bytes of saved storages on the device when the hook before was left

    @property
    def position(self) -> int:
        """The number of the next access."""
        return len(self.order)

    @property
    def movable(self) -> int:
        """Bytes of all records that may move."""
        return sum(nbytes for nbytes, pinned in zip(self.nbytes, self.pinned, strict=True) if not pinned)

    @property
    def truncated(self) -> bool:
        """Whether the pass outgrew its recording, or an error ended it."""
        return self.broken or len(self.order) >= self.MAX_ACCESSES

    def enter(self) -> None:
        """A hook begins: the computation since the hook before ends here."""
        if self._inside:
            self.broken = True
        self._inside = True
        if not self._watches or self.truncated:
            return
        if self.timed:
            self.marks.append(self.device.mark())
        if self.measure:
            self._note(self.device.peak())

    def _note(self, peak: Peak) -> None:
        if peak.held > self.peak:
            self.peak, self.peak_at = peak.held, len(self.other)
        self.in_use_peak = max(self.in_use_peak, peak.in_use)
        other = max(1, peak.in_use - self._present)  # zero means "not measured"
        self.worst = max(self.worst, other)
        self.other.append(other)

    def leave(self, held: int, present: int) -> None:
        """A hook ends: `held` bytes are held by LMS, `present` bytes of saved storages are on the device."""
        self._inside = False
        if not self._watches or self.truncated:
            return
        self.held.append(held)
        if self.measure:
            self._present = present
            self.device.reset_peak()
        if self.timed:
            self.marks.append(self.device.mark())

    def reenter(self) -> None:
        """The hook that was left last goes on."""
        self._inside = True
        if self.timed and not self.truncated:
            self.held.pop()
            self.marks.pop()

    def new(self, nbytes: int, label: Label, *, pinned: bool) -> None:
        """A record is saved for the first time. Its number is how many there were."""
        self.nbytes.append(nbytes)
        self.first.append(-1)
        self.last_save.append(-1)
        self.freed.append(-1)
        self.let_go.append(None)
        self.pinned.append(pinned)
        self.foreseen.append(pinned)
        self.labels.append(label)

    def foresee(self, nbytes: Sequence[int], labels: Sequence[Label], pinned: Sequence[bool]) -> None:
        """These are the records of the pass, as long as it goes on as planned. None is saved yet."""
        count = len(nbytes)
        self.nbytes, self.labels = list(nbytes), list(labels)
        self.pinned, self.foreseen = list(pinned), list(pinned)
        self.first, self.last_save, self.freed = [-1] * count, [-1] * count, [-1] * count
        self.let_go = [None] * count

    def cut(self, count: int) -> None:
        """Of the records that were foreseen only the first `count` were saved."""
        for column in (self.nbytes, self.labels, self.pinned, self.foreseen, self.first, self.last_save, self.freed):
            del column[count:]
        # Nothing noted when the forward let go of a tensor that has left.
        self.let_go = [None] * count

    def access(self, kind: AccessKind, index: int) -> None:
        """One access of record `index`."""
        position = len(self.order)
        if self.broken or position >= self.MAX_ACCESSES:
            return
        if kind != "read":
            self.last_save[index] = position
            if self.first[index] < 0:
                self.first[index] = position
        self.kinds.append(kind)
        self.order.append(index)

    def keys(self) -> list[tuple[AccessKind, int, int]]:
        """For each access its kind, tensor and bytes: by these a later pass is compared with this one."""
        return [(kind, index, self.nbytes[index]) for kind, index in zip(self.kinds, self.order, strict=True)]

    def finish(self, own: float = 0.0) -> None:
        """The pass ends: no record is live. LMS has worked or waited for `own` seconds of it."""
        self.broken |= self._inside
        self.seconds, self._own = perf_counter() - self._began, own
        if self.timed:
            self.marks.append(self.device.mark())
        if self.measure:
            self._note(self.device.peak())
            self.device.reset_peak()  # what comes now is the optimizer's step, not this pass
        else:
            self.peak = self.device.peak().held

    @property
    def peak_module(self) -> str:
        """The module that ran when the peak stood; empty if it was not measured."""
        if self.peak_at is None or not self.order:
            return ""
        return self.labels[self.order[min(self.peak_at, len(self.order) - 1)]][0]

    def gaps(self) -> list[float]:
        """Seconds of computation before each access, and in the tail, once the pass is finished.

        If it was not timed, all are the same.
        """
        if not self.timed:
            count = len(self.order) + 1
            return [max(0.0, self.seconds - self._own) / count] * count
        return self.device.elapsed(self.marks)[::2]

    def timeline(self) -> Timeline:
        """The pass as it ran, with the copies whose times the engine knows."""
        seconds = self.device.elapsed(self.marks)
        spans: list[Span] = []
        held = [(0.0, 0)]
        now = 0.0
        for at, (gap, hook) in enumerate(zip(seconds[::2], [*seconds[1::2], 0.0], strict=True)):
            spans.append(Span("compute", now, now + gap))
            now += gap
            if hook:
                spans.append(Span("stall", now, now + hook))
                now += hook
                held.append((now, self.held[at]))
        start = self.marks[0]
        for lane, index, copy in self.copies:
            if copy.span is not None and isinstance(start, float):
                spans.append(Span(lane, copy.span[0] - start, copy.span[1] - start, copy.nbytes, index))
        return Timeline(tuple(spans), tuple(held))

    def trace(
        self,
        capacity: int,
        link: Mapping[str, object],
        machine: Mapping[str, str],
        gaps: Sequence[float] | None = None,
    ) -> Trace:
        """The pass as plain data, with its own times unless others are given."""
        gaps = self.gaps() if gaps is None else gaps
        end = len(self.order)
        other = list(self.other) if self.measure else [0] * (end + 1)
        if self.measure:
            more = [0] * (end + 2)
            for index, nbytes in enumerate(self.nbytes):
                if self.pinned[index] and not self.foreseen[index]:
                    # Its end showed that it is the script's. Until then it counted as LMS's.
                    more[self.first[index] + 1] += nbytes
            other = [now + plus for now, plus in zip(other, accumulate(more), strict=False)]
        tensors = tuple(
            Tensor(
                nbytes=self.nbytes[index],
                freed=self.freed[index] if self.freed[index] >= 0 else end,
                let_go=self.let_go[index],
                pinned=self.pinned[index],
                module=module,
                dtype=dtype,
                shape=shape,
            )
            for index, (module, dtype, shape) in enumerate(self.labels)
        )
        accesses = tuple(
            Access(kind, index, gaps[at], other[at])
            for at, (kind, index) in enumerate(zip(self.kinds, self.order, strict=True))
        )
        return Trace(
            tensors=tensors,
            accesses=accesses,
            device=self.device.name,
            capacity=capacity,
            tail=gaps[-1],
            tail_other=other[end],
            link=link,
            machine=machine,
        )


@dataclass
class Counters:
    """Bytes moved and seconds waited."""

    out: int = 0
    back: int = 0
    stall_out: float = 0.0
    stall_in: float = 0.0
    hook: float = 0.0  # in LMS, waiting left out

    def since(self, before: Counters) -> Counters:
        """The difference to an earlier state."""
        return Counters(*(getattr(self, one.name) - getattr(before, one.name) for one in fields(self)))


@dataclass
class Finished:
    """A complete pass, for the planner to learn from."""

    recorder: Recorder
    guide: Guide | None  # the plan for just this sequence of accesses; None when none is known
    counters: Counters
    held_peak: int
    plan: Plan | None = None  # the one that it followed from its begin to its end
