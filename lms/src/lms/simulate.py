"""A trace, a schedule and a link in; the step's time, its stalls and its memory out. Pure: no clock, no framework.

Each direction of the link is one queue that copies one record at a time in order. The rules are those of
`lms.schedule`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Literal

from lms.link import Link
from lms.schedule import Move, Schedule
from lms.timeline import Span
from lms.trace import Trace

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


class _Simulation:
    """The state of one run: a clock, two queues, and where each record is."""

    def __init__(self, trace: Trace, schedule: Schedule, link: Link) -> None:
        self.trace, self.schedule, self.link = trace, schedule, link
        self.now, self.position = 0.0, 0
        self.held = 0
        self.lingering = 0  # bytes that LMS let go of and the forward pass still holds
        self.let_go: dict[int, int] = defaultdict(int)
        self.out_free = self.back_free = 0.0
        self.stall_out = self.stall_in = 0.0
        self.bytes_out = self.bytes_back = self.misses = 0
        self.where: list[Literal["nowhere", "here", "leaving", "out", "coming", "freed"]] = ["nowhere"] * len(
            trace.records
        )
        self.leaving: deque[tuple[int, float]] = deque()  # (record, when its copy is complete), oldest first
        self.arrival: dict[int, float] = {}
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
            self.freed[record.freed].append(index)

    def run(self) -> Forecast:
        drops: list[Move] = []
        for position, access in enumerate(self.trace.accesses):
            self._compute(access.seconds, access.other)
            self.position = position
            self.lingering -= self.let_go.pop(position, 0)
            for index in self.freed[position]:
                self._free(index)
            self._settle()
            for move in drops:
                self._drop(move.record)
            drops = []
            if not self.trace.records[access.record].pinned:
                if access.kind == "save":
                    self._save(access.record)
                else:
                    self._use(access.record, self.schedule.cap[position])
            for move in self.starts[position]:
                if move.write:
                    self._leave(move.record)
                else:
                    drops.append(move)
            self._make_room(self.schedule.cap[position])
            self._fetch(position)
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

    def _hold(self, change: int) -> None:
        self.held += change
        self.held_peak = max(self.held_peak, self.held)
        self.stairs.append((self.now, self.held))

    def _compute(self, seconds: float, other: int) -> None:
        if other:
            self.resident_peak = max(self.resident_peak, other + self.held + self.lingering)
        if seconds > 0:
            self.spans.append(Span("compute", self.now, self.now + seconds))
            self.now += seconds

    def _stall(self, until: float, record: int) -> float:
        waited = max(0.0, until - self.now)
        if waited:
            self.spans.append(Span("stall", self.now, until, self.trace.records[record].nbytes, record))
            self.now = until
        return waited

    def _free(self, index: int) -> None:
        if self.where[index] in ("here", "leaving", "coming"):
            self._hold(-self.trace.records[index].nbytes)
        self.where[index] = "freed"

    def _settle(self) -> None:
        while self.leaving and self.leaving[0][1] <= self.now:
            self._drop(self.leaving.popleft()[0], "leaving")

    def _drop(self, index: int, expected: str = "here") -> None:
        if self.where[index] == expected:
            record = self.trace.records[index]
            self.where[index] = "out"
            self._hold(-record.nbytes)
            if record.let_go is not None and record.let_go > self.position:
                self.lingering += record.nbytes
                self.let_go[record.let_go] += record.nbytes

    def _save(self, index: int) -> None:
        if self.where[index] == "nowhere":
            self.where[index] = "here"
            self._hold(self.trace.records[index].nbytes)

    def _use(self, index: int, cap: int) -> None:
        if self.where[index] == "out":
            self.misses += (index, self.position) not in self.on_demand
            self._make_room(cap - self.trace.records[index].nbytes)
            self._come(index)
        if self.where[index] == "coming":
            self.stall_in += self._stall(self.arrival[index], index)
            self.where[index] = "here"

    def _leave(self, index: int) -> None:
        if self.where[index] != "here":
            return
        nbytes = self.trace.records[index].nbytes
        start = max(self.now, self.out_free)
        self.out_free = start + self.link.seconds_out(nbytes)
        self.spans.append(Span("out", start, self.out_free, nbytes, index))
        self.bytes_out += nbytes
        self.where[index] = "leaving"
        self.leaving.append((index, self.out_free))

    def _make_room(self, cap: int) -> None:
        ahead = self.schedule.write_ahead
        while self.leaving and (self.held > cap or (ahead is not None and len(self.leaving) > ahead)):
            index, done = self.leaving[0]
            if self.where[index] == "leaving":
                self.stall_out += self._stall(done, index)
                self._settle()
            else:
                self.leaving.popleft()

    def _fetch(self, position: int) -> None:
        cap = self.schedule.cap[position]
        while self.due and self.due[0].fetch <= position:
            move = self.due[0]
            state = self.where[move.record]
            if state == "out" and move.before > position:
                if self.held + self.trace.records[move.record].nbytes > cap:
                    return
                self._come(move.record)
            elif state == "leaving":
                self.where[move.record] = "here"
            self.due.popleft()

    def _come(self, index: int) -> None:
        nbytes = self.trace.records[index].nbytes
        start = max(self.now, self.back_free)
        self.back_free = start + self.link.seconds_back(nbytes)
        self.spans.append(Span("back", start, self.back_free, nbytes, index))
        self.bytes_back += nbytes
        self.arrival[index] = self.back_free
        self.where[index] = "coming"
        self._hold(nbytes)
