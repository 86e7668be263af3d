"""A trace, a schedule and a link in; the step's time, its stalls and its memory out. Pure: no clock, no framework.

Each direction of the link is one queue that copies one record at a time in order. The rules are those of
`lms.core.schedule`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Literal

from lms.core.schedule import Move, Schedule
from lms.core.timeline import Span
from lms.core.trace import Record, Trace
from lms.link import Link

# "dead": freed while a copy was in flight, whose memory is given back when that is complete.
Where = Literal["nowhere", "here", "leaving", "out", "coming", "dead", "freed"]


@dataclass(frozen=True)
class Forecast:
    """What a schedule costs. Seconds and bytes."""

    seconds: float  # the whole pass
    stall_out: float  # waiting for copies out, so that memory is free
    stall_in: float  # waiting for copies back, so that a use has its record
    busy_out: float  # the link's time for the copies out
    busy_in: float
    held_peak: int  # most bytes of records held at once, copies in flight included
    resident_peak: int  # most bytes on the device, everything included; 0 when the trace did not measure the rest
    out: int  # bytes moved out
    back: int  # bytes moved back
    misses: int  # uses that had to start their own copy
    spans: tuple[Span, ...] = field(default=(), repr=False)
    held: tuple[tuple[float, int], ...] = field(default=(), repr=False)  # (seconds, bytes held from then on)


def simulate(trace: Trace, schedule: Schedule, link: Link) -> Forecast:
    """What executing `schedule` on `link` costs, by the recorded computation of `trace`."""
    return _Simulation(trace, schedule, link).run()


def lingers_until(record: Record, before: int) -> int:
    """The access from which on the forward does not keep `record`, once LMS let go of it ahead of access `before`.

    Whoever saves it once more holds it until then.
    """
    return max([record.let_go or 0, *(at + 1 for at in record.saves if at < before)])


class _Simulation:
    """The state of one run: a clock, two queues, and where each record is."""

    def __init__(self, trace: Trace, schedule: Schedule, link: Link) -> None:
        self.trace, self.schedule, self.link = trace, schedule, link
        self.now, self.position = 0.0, 0
        self.held = 0
        self.lingering: dict[int, int] = {}  # records that LMS let go of and the forward holds, and until when
        self.lingering_bytes = 0
        self.out_free = self.back_free = 0.0
        self.stall_out = self.stall_in = 0.0
        self.bytes_out = self.bytes_back = self.misses = 0
        self.where: list[Where] = ["nowhere"] * len(trace.records)
        self.before = [0] * len(trace.records)  # the access that the record's last move ends with
        self.leaving: deque[tuple[int, float]] = deque()  # (record, when its copy is complete), oldest first
        self.copying: set[int] = set()  # the records in it
        self.arrival: dict[int, float] = {}  # of copies back that are not in use yet
        self.abandoned: dict[int, float] = {}  # freed with a copy back in flight, and when that is complete
        self.spans: list[Span] = []
        self.stairs: list[tuple[float, int]] = [(0.0, 0)]
        self.held_peak = self.resident_peak = 0
        self.starts: dict[int, list[Move]] = defaultdict(list)
        for move in schedule.moves:
            self.starts[move.after].append(move)
        returns = schedule.returns(len(trace.accesses))
        self.on_demand = {(move.record, move.before) for move in returns if move.fetch == move.before}
        self.due = deque(returns)
        self.freed: dict[int, list[int]] = defaultdict(list)
        for index, record in enumerate(trace.records):
            if not record.pinned:
                self.freed[record.freed].append(index)

    def run(self) -> Forecast:
        drops: list[Move] = []
        for position, access in enumerate(self.trace.accesses):
            self._compute(access.seconds, access.other)
            self.position = position
            self._settle()
            for index in self.freed.get(position, ()):
                self._free(index)
            for move in drops:
                self._drop(move.record)
            drops = []
            cap = self.schedule.cap[position]
            if not self.trace.records[access.record].pinned:
                if access.kind == "save":
                    self._save(access.record)
                else:
                    self._use(access.record, cap)
            for move in self.starts.get(position, ()):
                self.before[move.record] = move.before
                if move.write:
                    self._leave(move.record)
                else:
                    drops.append(move)
            self._make_room(cap)
            self._fetch(position, cap)
        self._compute(self.trace.tail, self.trace.tail_other)
        return Forecast(
            seconds=self.now,
            stall_out=self.stall_out,
            stall_in=self.stall_in,
            busy_out=sum(s.end - s.start for s in self.spans if s.lane == "out"),
            busy_in=sum(s.end - s.start for s in self.spans if s.lane == "back"),
            held_peak=self.held_peak,
            resident_peak=self.resident_peak,
            out=self.bytes_out,
            back=self.bytes_back,
            misses=self.misses,
            spans=tuple(self.spans),
            held=tuple(self.stairs),
        )

    def _nbytes(self, index: int) -> int:
        return self.trace.records[index].nbytes

    def _hold(self, change: int) -> None:
        self.held += change
        self.held_peak = max(self.held_peak, self.held)
        self.stairs.append((self.now, self.held))

    def _compute(self, seconds: float, other: int) -> None:
        if other:
            self.resident_peak = max(self.resident_peak, other + self.held + self.lingering_bytes)
        if seconds > 0:
            self.spans.append(Span("compute", self.now, self.now + seconds))
            self.now += seconds

    def _stall(self, until: float, record: int) -> float:
        waited = max(0.0, until - self.now)
        if waited:
            self.spans.append(Span("stall", self.now, until, self._nbytes(record), record))
            self.now = until
        return waited

    # Memory that is given back

    def _settle(self) -> None:
        """Give back what complete copies and the forward let go of."""
        while self.leaving and self.leaving[0][1] <= self.now:
            self._depart()
        if self.abandoned:
            for index in [index for index, done in self.abandoned.items() if done <= self.now]:
                del self.abandoned[index]
                self._gone(index)
        if self.lingering:
            for index in [index for index, end in self.lingering.items() if end <= self.position]:
                self._linger_no_more(index)

    def _depart(self) -> None:
        """The oldest copy out is complete. A record that is in use again stays, and is clean from now on."""
        index, _ = self.leaving.popleft()
        self.copying.discard(index)
        if self.where[index] == "leaving":
            self._let_go(index)
        elif self.where[index] == "dead":
            self._gone(index)

    def _let_go(self, index: int) -> None:
        self.where[index] = "out"
        self._hold(-self._nbytes(index))
        end = lingers_until(self.trace.records[index], self.before[index])
        if end > self.position:
            self.lingering[index] = end
            self.lingering_bytes += self._nbytes(index)

    def _linger_no_more(self, index: int) -> None:
        del self.lingering[index]
        self.lingering_bytes -= self._nbytes(index)

    def _gone(self, index: int) -> None:
        self.where[index] = "freed"
        self._hold(-self._nbytes(index))

    def _free(self, index: int) -> None:
        if self.where[index] == "coming":
            self.where[index] = "dead"
            self.abandoned[index] = self.arrival.pop(index)
        elif index in self.copying:
            self.where[index] = "dead"
        elif self.where[index] == "here":
            self._gone(index)
        else:
            self.where[index] = "freed"

    def _drop(self, index: int) -> None:
        if self.where[index] == "here":
            if index in self.copying:
                self.where[index] = "leaving"
            else:
                self._let_go(index)

    def _make_room(self, cap: int) -> None:
        ahead = self.schedule.write_ahead
        while self.leaving and (self.held > cap or (ahead is not None and len(self.leaving) > ahead)):
            index, done = self.leaving[0]
            if self.where[index] != "here":
                self.stall_out += self._stall(done, index)
            self._depart()

    # Records that are needed

    def _save(self, index: int) -> None:
        if self.where[index] == "nowhere":
            self.where[index] = "here"
            self._hold(self._nbytes(index))

    def _use(self, index: int, cap: int) -> None:
        if self.where[index] == "leaving":
            self.where[index] = "here"
        if self.where[index] == "out":
            self.misses += (index, self.position) not in self.on_demand
            self._make_room(cap - self._nbytes(index))
            self._come(index)
        if self.where[index] == "coming":
            self.stall_in += self._stall(self.arrival.pop(index), index)
            self.where[index] = "here"

    # Copies that start

    def _leave(self, index: int) -> None:
        if self.where[index] != "here":
            return
        nbytes = self._nbytes(index)
        start = max(self.now, self.out_free)
        self.out_free = start + self.link.seconds_out(nbytes)
        self.spans.append(Span("out", start, self.out_free, nbytes, index))
        self.bytes_out += nbytes
        self.where[index] = "leaving"
        self.leaving.append((index, self.out_free))
        self.copying.add(index)

    def _fetch(self, position: int, cap: int) -> None:
        while self.due and self.due[0].fetch <= position:
            move = self.due[0]
            state = self.where[move.record]
            if state == "out" and move.before > position:
                if self.held + self._nbytes(move.record) > cap:
                    return
                self._come(move.record)
            elif state == "leaving":
                self.where[move.record] = "here"
            self.due.popleft()

    def _come(self, index: int) -> None:
        nbytes = self._nbytes(index)
        self._hold(nbytes)
        if index in self.lingering:  # somebody kept it after all, so there is nothing to copy
            self._linger_no_more(index)
            self.where[index] = "here"
            return
        start = max(self.now, self.back_free)
        self.back_free = start + self.link.seconds_back(nbytes)
        self.spans.append(Span("back", start, self.back_free, nbytes, index))
        self.bytes_back += nbytes
        self.arrival[index] = self.back_free
        self.where[index] = "coming"
