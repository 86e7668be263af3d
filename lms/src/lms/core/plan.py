"""Trace + link + limit -> Plan: which records move, when they leave, when they start back, and why. Pure.

The method is greedy over gaps, after the ranking of Capuchin (Peng et al., ASPLOS 2020, section 4.3): a record's gap
between its last use in the forward pass and its first in the backward is worth the more, the more it frees and the
longer the link has to hide the copies. Several rankings are tried; the simulator decides between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from lms.core.schedule import Move, Schedule
from lms.core.simulate import Forecast, simulate
from lms.core.trace import Trace
from lms.errors import LimitError, UsageError
from lms.link import Link
from lms.units import format_size

Bytes = NDArray[np.int64]


@dataclass(frozen=True)
class Plan(Schedule):
    """A schedule with its price and its reasons."""

    limit: int | None = None  # most bytes on the device, as given
    budget: int = 0  # most bytes of records that may stay
    floor: int = 0  # the resident peak with nothing kept; 0 when the trace did not measure the rest
    floor_module: str = ""  # the module whose working set the floor is
    plain_peak: int = 0  # the resident peak with nothing moved; 0 as above
    forecast: Forecast = field(default_factory=lambda: Forecast(0, 0, 0, 0, 0, 0, 0, 0, 0, 0))
    reasons: Mapping[int, str] = field(default_factory=dict)  # for each record: why it stays or goes
    ranking: str = ""  # the ranking that the simulator found best

    @property
    def swapped(self) -> int:
        """Bytes that the plan moves out in one pass."""
        return self.forecast.out

    def moved(self) -> frozenset[int]:
        """Indices of the records that leave memory at least once."""
        return frozenset(move.record for move in self.moves)


@dataclass(frozen=True)
class Gap:
    """A stretch of a pass in which a record is not needed: absent from `start` up to, not including, `before`."""

    record: int
    nbytes: int
    after: int  # its way out can start with this access
    start: int
    before: int
    seconds: float  # computation in it: what the link has to hide the copies
    comes_back: bool
    used: bool  # it begins with a use: whoever leaves for it has come back once already


def make_plan(
    trace: Trace,
    link: Link,
    *,
    limit: int | None = None,
    budget: int | None = None,
    prefetch: int | None = None,
    write_ahead: int | None = None,
) -> Plan:
    """The plan for one pass under `limit` (bytes on the device) or `budget` (bytes of records that may stay).

    `prefetch` is the most accesses that a copy back may start ahead of its use, `write_ahead` the most copies out in
    flight; None leaves both to the plan. With a limit the trace must have measured the rest of the device's bytes.

    Raises LimitError when the limit lies below the floor, UsageError unless exactly one of limit and budget is given.
    """
    if (limit is None) == (budget is None):
        raise UsageError("give exactly one of limit and budget")
    gaps = _gaps(trace)
    lowest, where = floor(trace)
    if limit is not None and lowest > limit:
        raise LimitError(
            f"limit {format_size(limit)} is below the floor of {format_size(lowest)}: with every record swapped, "
            f"{_module(trace, where)} still needs that much. Raise the limit to {format_size(lowest * 1.02)} or more, "
            "or make that module's working set smaller (batch, resolution, width)"
        )
    cap = _caps(trace, limit=limit, budget=budget)
    target = _target(trace, gaps, cap, bounded=limit is not None)
    options: dict[Schedule, tuple[str, list[Gap]]] = {}
    for name, rank in _RANKINGS.items():
        chosen = _choose(trace, gaps, target, cap, rank)
        caps = cap if limit is None else cap - _lingering(trace, chosen)
        moves = _moves(trace, chosen, cap, prefetch)
        options.setdefault(Schedule(moves, tuple(caps.tolist()), write_ahead), (name, chosen))
    schedule = _best(trace, list(options), link)
    ranking, chosen = options[schedule]
    return Plan(
        moves=schedule.moves,
        cap=schedule.cap,
        write_ahead=write_ahead,
        limit=limit,
        budget=budget if budget is not None else max(0, min(cap.tolist(), default=0) - trace.largest),
        floor=lowest,
        floor_module=_module(trace, where) if lowest else "",
        plain_peak=plain_peak(trace),
        forecast=simulate(trace, schedule, link),
        reasons=_reasons(trace, link, chosen, gaps),
        ranking=ranking,
    )


def plain_peak(trace: Trace) -> int:
    """The resident peak of the pass with nothing moved; 0 when the trace did not measure the rest."""
    other = _other(trace)
    return int((other + _before(np.array(trace.live, np.int64))).max(initial=0)) if other.any() else 0


def floor(trace: Trace) -> tuple[int, int]:
    """The resident peak with a budget of zero, and the access at which it stands; (0, 0) when not measured."""
    other = _other(trace)
    if not other.any():
        return 0, 0
    resident = other + _before(_profile(trace, _gaps(trace)))
    where = int(resident.argmax())
    return int(resident[where]), min(where, len(trace.accesses) - 1)


def table(trace: Trace, link: Link, shares: Sequence[float] = (1.0, 0.75, 0.5, 0.35, 0.25, 0.0)) -> list[Plan]:
    """A plan for each share of the saved bytes that may stay: what a limit costs, before it is paid.

    Each plan's `limit` is the one to ask for: its predicted resident peak and one record of room.
    """
    rows = []
    for share in shares:
        row = make_plan(trace, link, budget=int(share * trace.saved))
        peak = row.forecast.resident_peak
        rows.append(replace(row, limit=peak + trace.largest if peak else None))
    return rows


def _module(trace: Trace, access: int) -> str:
    if not trace.accesses:
        return "the model"
    name = trace.records[trace.accesses[access].record].module
    return f"module {name!r}" if name else "the model"


def _other(trace: Trace) -> Bytes:
    """Bytes that LMS does not hold, most in the stretch before each access and in the tail: len(accesses) + 1."""
    return np.array([access.other for access in trace.accesses] + [trace.tail_other], np.int64)


def _before(profile: Bytes) -> Bytes:
    """What is held in the stretch before each access and in the tail: the profile, one access later."""
    return np.concatenate([np.zeros(1, np.int64), profile])


def _gaps(trace: Trace) -> list[Gap]:
    """Every stretch in which a record could be away."""
    clock = np.cumsum([*(access.seconds for access in trace.accesses), trace.tail])  # at each access, and at the end
    gaps: list[Gap] = []
    end = len(trace.accesses)
    for index, record in enumerate(trace.records):
        if record.pinned:
            continue
        touches = sorted([(at, "save") for at in record.saves] + [(at, "use") for at in record.uses])
        after = record.saves[0]  # its bytes do not change from then on
        for (at, kind), (following, next_kind) in zip(touches, [*touches[1:], (record.freed, "free")], strict=True):
            if kind == "use":
                after = at
            if next_kind == "save":
                continue  # whoever saves it next holds it until then
            start = max(at + 1, record.let_go or 0)
            if start >= following:
                continue
            # What used it has it in hand until the next access; what saved it is what let_go tells of.
            seconds = float(clock[following] - clock[start - (kind == "save")])
            if kind == "use" and seconds < _ONE_OPERATION:
                continue  # one operation that unpacks several records has all of them in hand
            gaps.append(
                Gap(
                    record=index,
                    nbytes=record.nbytes,
                    after=after,
                    start=start,
                    before=min(following, end),
                    seconds=seconds,
                    comes_back=next_kind == "use",
                    used=kind == "use",
                )
            )
    return gaps


def _caps(trace: Trace, *, limit: int | None, budget: int | None) -> Bytes:
    """Most held bytes once each access is done with.

    An operation allocates its result before it saves it, so room for a record is made one access ahead. Under a
    limit the trace's `other` includes that already.
    """
    if limit is not None:
        return limit - _other(trace)[1:]
    return (budget or 0) + trace.largest - _next_new(trace)


def _next_new(trace: Trace) -> Bytes:
    """Bytes of the record that the access after each saves for the first time; 0 where it saves none."""
    new = np.zeros(len(trace.accesses) + 1, np.int64)
    for record in trace.records:
        if not record.pinned:
            new[record.saves[0]] = record.nbytes
    return new[1:]


def _profile(trace: Trace, chosen: Sequence[Gap]) -> Bytes:
    """Bytes held at each access when the link takes no time and the chosen gaps are used."""
    change = np.zeros(len(trace.accesses) + 1, np.int64)
    for gap in chosen:
        change[gap.start] -= gap.nbytes
        change[gap.before] += gap.nbytes
    return np.array(trace.live, np.int64) + np.cumsum(change)[:-1]


def _lingering(trace: Trace, chosen: Sequence[Gap]) -> Bytes:
    """Bytes at each access that LMS may have let go of by then while the forward still holds them."""
    change = np.zeros(len(trace.accesses) + 1, np.int64)
    for gap in chosen:
        change[gap.after + 1] += gap.nbytes
        change[gap.start] -= gap.nbytes
    return np.cumsum(change)[:-1]


def _target(trace: Trace, gaps: Sequence[Gap], cap: Bytes, *, bounded: bool) -> Bytes:
    """What may be there at each access when the link takes no time.

    Under a limit that is the cap. Room that is kept free for copies in flight is not worth the bytes that have to
    move for it: records in hand make it as they are freed. Under a budget, what stays is the budget, the record in
    hand, and no more; the rest of the tolerance is for copies in flight.
    """
    target = cap.copy()
    if not bounded:
        in_hand = [trace.records[access.record] for access in trace.accesses]
        hand = np.array([0 if record.pinned else record.nbytes for record in in_hand], np.int64)
        target -= np.maximum(trace.largest - hand - _next_new(trace), 0)
    lowest: Bytes = _profile(trace, gaps)
    return np.maximum(target, lowest, out=target)


_ONE_OPERATION = 1e-4  # seconds; the accesses of one operation follow each other within microseconds
_SLOWER = 0.8  # links vary; of two plans the one is better that is on a link of this share of the bandwidth

Rank = Callable[[Gap], float]
_RANKINGS: Mapping[str, Rank] = {
    "bytes x slack": lambda gap: gap.nbytes * gap.seconds,
    "slack": lambda gap: gap.seconds,
    "small first": lambda gap: -gap.nbytes,
}


def _choose(trace: Trace, gaps: Sequence[Gap], target: Bytes, cap: Bytes, rank: Rank) -> list[Gap]:
    """Gaps that bring the profile under the target everywhere, in the order of their start.

    By rank each gap is taken that covers an access with too much; what then proves needless is given back, the gaps
    with the least slack first. Between two uses a record may stay up to the cap: room for copies in flight is not worth
    one more of them.
    """
    profile = np.array(trace.live, np.int64)
    chosen: list[Gap] = []
    for gap in sorted(gaps, key=lambda gap: (-rank(gap), gap.after, gap.record)):
        if (profile[gap.start : gap.before] > target[gap.start : gap.before]).any():
            profile[gap.start : gap.before] -= gap.nbytes
            chosen.append(gap)
    kept: list[Gap] = []
    for gap in sorted(chosen, key=lambda gap: (gap.seconds, gap.record)):
        most = cap if gap.used and gap.comes_back else target
        if (profile[gap.start : gap.before] + gap.nbytes <= most[gap.start : gap.before]).all():
            profile[gap.start : gap.before] += gap.nbytes
        else:
            kept.append(gap)
    return sorted(kept, key=lambda gap: (gap.after, gap.record))


def _moves(trace: Trace, chosen: Sequence[Gap], cap: Bytes, prefetch: int | None) -> tuple[Move, ...]:
    """Moves for the chosen gaps: each starts back as early as the memory of every access up to its use allows."""
    profile = _profile(trace, chosen)
    end = len(trace.accesses)
    uses = np.array([index for index, access in enumerate(trace.accesses) if access.kind == "use"], np.int64)
    # The first time that a record leaves it is written; after that the tier below has its bytes.
    first_out = {gap.record: gap for gap in sorted(chosen, key=lambda gap: -gap.start)}
    moves: list[Move] = []
    earliest = 0
    for gap in sorted(chosen, key=lambda gap: (gap.before, gap.record)):
        if not gap.comes_back:
            moves.append(Move(gap.record, gap.after, gap.before, end, first_out[gap.record] is gap))
            continue
        # Not before the backward: in the forward the profile is only what stays, not what is still on its way out.
        turn = int(uses[np.searchsorted(uses, gap.start)])
        first = max(earliest, min(turn, gap.before), gap.start)
        if prefetch is not None:
            first = max(first, gap.before - prefetch)
        first = min(first, gap.before)
        full = np.flatnonzero(profile[first : gap.before] + gap.nbytes > cap[first : gap.before])
        fetch = first + int(full[-1]) + 1 if len(full) else first
        profile[fetch : gap.before] += gap.nbytes
        earliest = fetch
        moves.append(Move(gap.record, gap.after, gap.before, fetch, first_out[gap.record] is gap))
    return tuple(sorted(moves, key=lambda move: (move.after, move.record)))


def _best(trace: Trace, schedules: Sequence[Schedule], link: Link) -> Schedule:
    """The schedule that takes the least time, on a link that is somewhat slower than it was measured.

    A step time within 1% of the best counts as equal: then what moves least is the kinder neighbour.
    """
    if len(schedules) == 1:
        return schedules[0]
    forecasts = [simulate(trace, schedule, link.scaled(_SLOWER)) for schedule in schedules]
    best = min(forecast.seconds for forecast in forecasts)
    return min(
        (pair for pair in zip(forecasts, schedules, strict=True) if pair[0].seconds <= 1.01 * best),
        key=lambda pair: (pair[0].out + pair[0].back, pair[0].seconds),
    )[1]


def _reasons(trace: Trace, link: Link, chosen: Sequence[Gap], gaps: Sequence[Gap]) -> dict[int, str]:
    """Why each record stays or goes, for people."""
    slack = {gap.record: gap for gap in reversed(gaps)}
    going = {gap.record: gap for gap in reversed(chosen)}
    reasons: dict[int, str] = {}
    for index, record in enumerate(trace.records):
        if record.pinned:
            reasons[index] = "stays: another owner keeps it alive, so swapping it frees nothing"
        elif index in going:
            gap = going[index]
            cost = link.seconds_out(gap.nbytes) + (link.seconds_back(gap.nbytes) if gap.comes_back else 0)
            reasons[index] = (
                f"goes: not needed for {gap.seconds * 1e3:.0f} ms of computation; its copies take {cost * 1e3:.0f} ms"
            )
        elif index in slack:
            reasons[index] = f"stays: fits, and is needed again within {slack[index].seconds * 1e3:.0f} ms"
        else:
            reasons[index] = "stays: never away from use long enough to move"
    return reasons
