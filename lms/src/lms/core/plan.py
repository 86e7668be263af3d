"""Trace + link + limit -> Plan: which tensors move, when they leave, when they start back, and why. Pure.

The method is greedy over gaps, after the ranking of Capuchin (Peng et al., ASPLOS 2020, section 4.3): a tensor's gap
between its last access in the forward pass and its first in the backward is worth the more, the more it frees and the
longer the link has to hide the copies. Several rankings are tried; the simulator decides between them. A step is a
cycle, so a tensor that lives on has a gap from its last access in one step to its first in the next.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from lms.core.gaps import Gap, find_gaps, held_at, held_before, lingering, parts_of
from lms.core.link import Link
from lms.core.profile import Bytes, Excess, lowest
from lms.core.schedule import Schedule, Swap
from lms.core.simulate import Forecast, simulate
from lms.core.trace import Trace
from lms.errors import LimitError, UsageError
from lms.units import format_size


@dataclass(frozen=True)
class Choice:
    """The modules that are recomputed, each with its reason, and the reason for the whole choice."""

    why: str
    modules: Mapping[str, str] = field(default_factory=dict)
    recomputed: int = 0  # most bytes at once that running them again makes
    seconds: float = 0.0  # the pass as it is foreseen with them


@dataclass(frozen=True)
class Plan(Schedule):
    """A schedule with its price and its reasons."""

    limit: int | None = None  # most bytes on the device, as given
    budget: int = 0  # most bytes of tensors that may stay
    floor: int = 0  # the resident peak with nothing kept; 0 when the trace did not measure the rest
    floor_module: str = ""  # the module that needs the floor
    plain_peak: int = 0  # the resident peak with nothing moved; 0 as above
    forecast: Forecast = field(default_factory=lambda: Forecast(0, 0, 0, 0, 0, 0, 0, 0, 0, 0))
    reasons: Mapping[int, str] = field(default_factory=dict)  # for each tensor: why it stays or goes
    ranking: str = ""  # the ranking that the simulator found best
    choice: Choice | None = None  # of modules that are recomputed, if one was made
    drift: str = ""  # why it replaces an earlier plan, if costs have drifted: which ones, and by how much

    @property
    def bounded_peak(self) -> int:
        """The most bytes foreseen of what the bound is about: on the device, or of tensors under a budget."""
        return self.forecast.resident_peak if self.limit is not None else self.forecast.held_peak

    def moved(self) -> frozenset[int]:
        """Indices of the tensors that leave memory at least once."""
        return frozenset(move.tensor for move in self.moves)


@contextmanager
def no_collections() -> Iterator[None]:
    """Plans and edited graphs are many objects and no cycles: the collector would look through them again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@no_collections()
def make_plan(
    trace: Trace,
    link: Link,
    *,
    limit: int | None = None,
    budget: int | None = None,
    prefetch: int | None = None,
    write_ahead: int | None = None,
    write_early: bool = True,
) -> Plan:
    """The plan for one step under `limit` (bytes on the device) or `budget` (bytes of tensors that may stay).

    `prefetch` is the most accesses that a copy back may start ahead of its use, `write_ahead` the most copies out in
    flight; None leaves both to the plan. If both are None and the tier below has the room (`write_early`), what leaves
    late may be written early. With a limit the trace must have measured the rest of the device's bytes.

    Raises LimitError when the limit lies below the floor, UsageError unless exactly one of limit and budget is given.
    """
    if (limit is None) == (budget is None):
        raise UsageError("give exactly one of limit and budget")
    gaps = find_gaps(trace)
    least, where = floor(trace, gaps)
    if limit is not None and least > limit:
        smaller = (
            "have what runs then, such as the optimizer's step, need less"
            if where == BETWEEN
            else "make that module's working set smaller (batch, resolution, width)"
        )
        raise LimitError(
            f"limit {format_size(limit)} is below the floor of {format_size(least)}: with every tensor swapped, "
            f"{where} still needs that much. Raise the limit to {format_size(least * 1.02)} or more, or {smaller}"
        )
    cap = caps(trace, gaps, limit=limit, budget=budget)
    target = _target(trace, gaps, cap, bounded=limit is not None)
    rankings: dict[tuple[Gap, ...], str] = {}  # what they choose, and the first that chose it
    for name, rank in _RANKINGS.items():
        rankings.setdefault(_choose(trace, gaps, target, cap, rank), name)
    choices = list(rankings)
    schedules = []
    for chosen in choices:
        lowered = cap if limit is None else cap - lingering(trace, chosen)
        schedules.append(Schedule(_moves(trace, chosen, cap, prefetch), tuple(lowered.tolist()), write_ahead))
    best = _best(trace, schedules, link)
    schedule, chosen = schedules[best], choices[best]
    if write_early and prefetch is None and write_ahead is None:
        schedule = _with_early_writes(trace, chosen, schedule, link)
    return Plan(
        moves=schedule.moves,
        cap=schedule.cap,
        write_ahead=write_ahead,
        limit=limit,
        budget=budget if budget is not None else max(0, min(cap.tolist(), default=0) - trace.largest),
        floor=least,
        floor_module=where,
        plain_peak=plain_peak(trace),
        forecast=simulate(trace, schedule, link),
        reasons=_reasons(trace, link, chosen, gaps),
        ranking=rankings[chosen],
    )


def plain_peak(trace: Trace) -> int:
    """The resident peak of the pass with nothing moved; 0 when the trace did not measure the rest."""
    return int((_others(trace) + held_before(trace, [])).max(initial=0)) if any(trace.others) else 0


BETWEEN = "the time between two passes"  # whose the floor is, if it is no module's


def step_peak(trace: Trace, plan: Plan) -> int:
    """The most bytes foreseen on the device, in the pass and between two passes; 0 if the pass was not measured."""
    return max(plan.forecast.resident_peak, trace.between) if plan.forecast.resident_peak else 0


def first_peak(trace: Trace, limit: int) -> int:
    """About the most bytes on the device in the first pass like this one, which has no plan; 0 if it was not measured.

    Such a pass leaves room for the scratch memory of the operations so far and for two more tensors (PassPlanner.room).
    """
    if not any(trace.others):
        return 0
    plain, least = held_before(trace, []), held_before(trace, find_gaps(trace))
    peak, worst, largest, room = 0, 0, 0, limit
    for at, other in enumerate(trace.others):
        peak = max(peak, other + min(int(plain[at]), max(room, int(least[at]))))
        if at < len(trace.accesses):
            worst, tensor = max(worst, other), trace.tensors[trace.accesses[at].tensor]
            largest = max(largest, 0 if tensor.pinned else tensor.nbytes)
            room = limit - worst - 2 * largest
    return peak


def floor(trace: Trace, gaps: Sequence[Gap] | None = None) -> tuple[int, str]:
    """The peak with a budget of zero, and whose it is: a module's, or `BETWEEN`. 0 and "" if not measured."""
    if not any(trace.others):
        return 0, ""
    resident = _others(trace) + held_before(trace, find_gaps(trace) if gaps is None else gaps)
    where = int(resident.argmax())
    if trace.between > resident[where]:
        return trace.between, BETWEEN
    access = trace.accesses[min(where, len(trace.accesses) - 1)] if trace.accesses else None
    name = trace.tensors[access.tensor].module if access is not None else ""
    return int(resident[where]), f"module {name!r}" if name else "the model"


def table(trace: Trace, link: Link, shares: Sequence[float] = (1.0, 0.75, 0.5, 0.35, 0.25, 0.0)) -> list[Plan]:
    """A plan for each share of the saved bytes that may stay: what a limit costs, before it is paid.

    Each plan's `limit` is the one to ask for: its predicted peak, and room for one tensor or 2%, whichever is more.
    Once what runs between two passes needs more than the pass, no row follows: moving more would not lower the limit.
    """
    rows: list[Plan] = []
    for share in shares:
        row = make_plan(trace, link, budget=int(share * trace.saved))
        peak = step_peak(trace, row)
        limit = peak + max(trace.largest, peak // _ROOM) if peak else None
        rows.append(replace(row, limit=limit))
        if peak and peak == trace.between:
            break
    return rows


def _others(trace: Trace) -> Bytes:
    return np.array(trace.others, np.int64)


def caps(trace: Trace, gaps: Sequence[Gap], *, limit: int | None, budget: int | None) -> Bytes:
    """Most held bytes once each access is done with.

    An operation allocates its result before it saves it, so room for a tensor is made one access ahead. Under a
    limit the trace's `other` includes that already.
    """
    if limit is None:
        return (budget or 0) + trace.largest - _next_new(trace)
    other = _others(trace)
    if _is_cyclic(trace):
        # Tensors held after the last access are there before the next step's first, unless they end with the step.
        end = len(trace.accesses)
        ending = {index for index, tensor in enumerate(trace.tensors) if tensor.freed == end and not tensor.pinned}
        ending -= {gap.tensor for gap in gaps if gap.before == end}  # it may be away by then
        other[-1] = max(other[-1], other[0] - sum(trace.tensors[index].nbytes for index in ending))
    return limit - other[1:]


def _is_cyclic(trace: Trace) -> bool:
    return any(tensor.freed is None and not tensor.pinned for tensor in trace.tensors)


def _next_new(trace: Trace) -> Bytes:
    """Bytes of the tensor that comes into being with the access after each; 0 if none does."""
    new = np.zeros(len(trace.accesses) + 1, np.int64)
    for tensor, touches in zip(trace.tensors, trace.touches, strict=True):
        if not tensor.pinned and tensor.freed is not None:
            new[touches[0]] = tensor.nbytes
    if _is_cyclic(trace):
        new[-1] = new[0]  # the next step begins as this one
    return new[1:]


def _target(trace: Trace, gaps: Sequence[Gap], cap: Bytes, *, bounded: bool) -> Bytes:
    """Bytes that may be there at each access if the link takes no time.

    Under a limit that is the cap. Room that is kept free for copies in flight is not worth the bytes that have to
    move for it: tensors in hand make it as they are freed. Under a budget, what stays is the budget, the tensor in
    hand, and no more; the rest of the tolerance is for copies in flight.
    """
    target = cap.copy()
    if not bounded:
        in_hand = [trace.tensors[access.tensor] for access in trace.accesses]
        hand = np.array([0 if tensor.pinned else tensor.nbytes for tensor in in_hand], np.int64)
        target -= np.maximum(trace.largest - hand - _next_new(trace), 0)
    return np.maximum(target, held_at(trace, gaps), out=target)


_ROOM = 50  # the part of a peak that is left free, as plans do until the first copies were measured
_ALIKE = 1.01  # times of steps within this factor count as equal
_SLOWER = 0.8  # links vary; of two plans the one is better that is on a link of this share of the bandwidth

Rank = Callable[[Gap], float]
_RANKINGS: Mapping[str, Rank] = {
    "bytes x slack": lambda gap: gap.nbytes * gap.seconds,
    "slack": lambda gap: gap.seconds,
    "small first": lambda gap: -gap.nbytes,
    "large first": lambda gap: gap.nbytes,  # each copy has its latency, and small tensors free little for it
}


def _choose(trace: Trace, gaps: Sequence[Gap], target: Bytes, cap: Bytes, rank: Rank) -> tuple[Gap, ...]:
    """Gaps that bring the profile under the target everywhere, in the order of their start.

    By rank each gap is taken that covers an access with too much. Gaps that then prove needless are given back, those
    with the least slack first. Between two reads a tensor may stay up to the cap: room for copies in flight is not
    worth one more of them.
    """
    end = len(trace.accesses)
    excess = Excess(held_at(trace, []) - target)
    chosen: list[Gap] = []
    for gap in sorted(gaps, key=lambda gap: (-rank(gap), gap.after, gap.tensor)):
        parts = parts_of(gap, end)
        if any(excess.within(start, stop) for start, stop in parts):
            for start, stop in parts:
                excess.lower(start, stop, gap.nbytes)
            chosen.append(gap)
    needless = _needless(trace, chosen, target, cap)
    return tuple(sorted((gap for gap in chosen if gap not in needless), key=lambda gap: (gap.after, gap.tensor)))


def _needless(trace: Trace, chosen: Sequence[Gap], target: Bytes, cap: Bytes) -> set[Gap]:
    """The chosen gaps that are not needed: their tensors can stay after all."""
    end = len(trace.accesses)
    held = held_at(trace, chosen)
    starts = np.array([gap.start for gap in chosen], np.int64)
    stops = np.array([gap.before for gap in chosen], np.int64)
    rooms = [lowest(np.tile(most - held, 2), starts, stops).tolist() for most in (target, cap)]
    # Room only shrinks from here on: a gap that has none now is not looked at again.
    roomy = [gap for gap, *room in zip(chosen, *rooms, strict=True) if gap.nbytes <= room[gap.between_reads]]
    needless: set[Gap] = set()
    full = 0  # an access that had no room for the gap before: most likely it has none for this one
    for gap in sorted(roomy, key=lambda gap: (gap.seconds, gap.tensor)):
        most = cap if gap.between_reads else target
        parts = parts_of(gap, end)
        if any(start <= full < stop for start, stop in parts) and held[full] + gap.nbytes > most[full]:
            continue
        for start, stop in parts:
            over = held[start:stop] + gap.nbytes > most[start:stop]
            if over.any():
                full = start + int(over.argmax())
                break
        else:
            for start, stop in parts:
                held[start:stop] += gap.nbytes
            needless.add(gap)
    return needless


def _moves(trace: Trace, chosen: Sequence[Gap], cap: Bytes, prefetch: int | None) -> tuple[Swap, ...]:
    """Moves for the chosen gaps, in the same order. A tensor not written since it was last away needs no copy out."""
    reloads = _reloads(trace, chosen, cap, prefetch)
    end = len(trace.accesses)
    # Before the first gap of what lives on comes the last one of the step before.
    away = {gap.tensor: gap.start - end for gap in chosen if trace.tensors[gap.tensor].freed is None}
    moves = []
    for gap in chosen:
        dirty = gap.written >= away.get(gap.tensor, 0)
        away[gap.tensor] = gap.start
        moves.append(Swap(gap.tensor, gap.after, gap.before, reloads.get(gap), dirty))
    return tuple(moves)


def _with_early_writes(trace: Trace, chosen: Sequence[Gap], schedule: Schedule, link: Link) -> Schedule:
    """The schedule in which what leaves late is written with its last write, if that is faster by 1%; else the same.

    Then it leaves without a copy. But it takes room in the tier below for longer.
    """
    moves: list[Swap] = []
    for gap, move in zip(chosen, schedule.moves, strict=True):
        touches = trace.touches[gap.tensor]
        begin = max(gap.written, touches[0])
        if move.write and begin < move.after:
            following = next(at for at in touches if at > begin and trace.accesses[at].kind != "hold")
            moves.append(Swap(gap.tensor, begin, following, reload=begin, write=True))  # it stays
            move = replace(move, write=False)
        moves.append(move)
    if len(moves) == len(schedule.moves):
        return schedule
    early = replace(schedule, moves=tuple(sorted(moves, key=lambda move: move.after)))
    late_seconds, seconds = (
        simulate(trace, one, link.scaled(_SLOWER), picture=False).seconds for one in (schedule, early)
    )
    return early if _ALIKE * seconds < late_seconds else schedule


def _reloads(trace: Trace, chosen: Sequence[Gap], cap: Bytes, prefetch: int | None) -> dict[Gap, int]:
    """With which access the way back may start: as early as the memory of every access up to the use allows.

    Copies back start in the order of their uses. So the accesses that the next one may fill are a window, and its ends
    only move on. Each earlier copy back fills all of them up to its own use.
    """
    end = len(trace.accesses)
    room = (cap - held_at(trace, chosen)).tolist()
    reads = np.array([index for index, access in enumerate(trace.accesses) if access.kind == "read"], np.int64)
    next_read = [*reads.tolist(), 0]
    turns = np.searchsorted(reads, np.arange(end + 1)).tolist()
    filled = [0] * (end + 1)  # by how much the bytes that copies back have filled change at each access
    filling = 0
    window: deque[tuple[int, int]] = deque()  # (bytes that may come back until it is full, access), both ascending
    seen = 0
    earliest = 0
    coming = 0
    reloads: dict[Gap, int] = {}
    for gap in sorted((gap for gap in chosen if gap.comes_back), key=lambda gap: (gap.before, gap.tensor)):
        for at in range(seen, gap.before):
            if at >= end:  # in the next step, with what comes back in this one
                filling += filled[at - end]
            most = room[at % end] - filling + coming
            while window and window[-1][0] >= most:
                window.pop()
            window.append((most, at))
        seen = gap.before
        # Not before the backward: in the forward the profile is only what stays, not what is still on its way out.
        first = max(earliest, min(next_read[turns[gap.start]], gap.before), gap.start)
        if prefetch is not None:
            first = max(first, gap.before - prefetch)
        first = min(first, gap.before)
        coming += gap.nbytes
        while window and window[0][0] < coming:
            first = max(first, window.popleft()[1] + 1)
        reloads[gap] = earliest = first
        filled[min(first, end)] += gap.nbytes
        filled[min(gap.before, end)] -= gap.nbytes
    return reloads


def _best(trace: Trace, schedules: Sequence[Schedule], link: Link) -> int:
    """The index of the schedule that takes the least time, on a link that is somewhat slower than it was measured.

    A step time within 1% of the best counts as equal: then what moves least is the kinder neighbour.
    """
    if len(schedules) == 1:
        return 0
    forecasts = [simulate(trace, schedule, link.scaled(_SLOWER), picture=False) for schedule in schedules]
    best = min(forecast.seconds for forecast in forecasts)
    return min(
        (index for index, forecast in enumerate(forecasts) if forecast.seconds <= _ALIKE * best),
        key=lambda index: (forecasts[index].out + forecasts[index].back, forecasts[index].seconds),
    )


def _reasons(trace: Trace, link: Link, chosen: Sequence[Gap], gaps: Sequence[Gap]) -> dict[int, str]:
    """Why each tensor stays or goes, for people."""
    slack = {gap.tensor: gap for gap in reversed(gaps)}
    going = {gap.tensor: gap for gap in reversed(chosen)}
    reasons: dict[int, str] = {}
    for index, tensor in enumerate(trace.tensors):
        if tensor.pinned:
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
