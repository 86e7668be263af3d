"""Keep, swap or recompute: which modules run their forward again in the backward, so that they save less. Pure.

A module that is recomputed saves only its inputs. When the backward first needs what it would have saved, its forward
runs once more, and what that saves is used at once (Chen et al., arXiv:1604.06174). A choice is worth what the
simulator says of the step that it leads to: each alternative is a trace of its own, planned and simulated as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from lms.core.gaps import find_gaps, held_at
from lms.core.link import Link
from lms.core.plan import Choice, floor, make_plan
from lms.core.trace import Access, AccessKind, Tensor, Trace
from lms.errors import LimitError
from lms.units import format_size

_EQUAL = 1.01  # step times that differ by less count as equal: then fewer modules are recomputed
_TRIED = 32  # candidates by which the best set is changed once more, each for itself
_LEAST_GAIN = 1e-3  # of the saved bytes: a module that saves less is not worth a plan
AT_ONCE = 2  # accesses after its save at which the forward has let go of most tensors


@dataclass(frozen=True)
class Call:
    """One forward of a module: it made the accesses from `first` up to, not including, `last`, all of them saves."""

    first: int
    last: int
    seconds: float  # what running it again costs: its computation up to the last tensor that it saves
    inputs: tuple[int, ...] = ()  # tensors of the trace that it needs to run again
    extra_inputs: tuple[int, ...] = ()  # bytes of each further input, which the step does not save so far


@dataclass(frozen=True)
class Candidate:
    """A module that can be recomputed: its forward gives the same bytes again, and changes nothing else."""

    name: str
    calls: tuple[Call, ...]
    within: frozenset[int] = frozenset()  # the candidates, by index, whose forward runs this one


def choose(
    trace: Trace, link: Link, candidates: Sequence[Candidate], *, limit: int | None = None, budget: int | None = None
) -> Choice:
    """The candidates whose recomputation makes the simulated step the shortest; none if swapping alone is as fast.

    `limit` and `budget` are as in `make_plan`. What a recomputed module makes counts among the bytes that stay, so a
    module is left out if that is more than what must be there without it. Raises LimitError if the limit is below
    the floor.
    """
    swapping = make_plan(trace, link, limit=limit, budget=budget)
    if not swapping.moves:
        return Choice("none: everything fits", seconds=swapping.forecast.seconds)
    if swapping.forecast.seconds <= _EQUAL * trace.seconds:
        return Choice("none: the link hides all copies", seconds=swapping.forecast.seconds)
    most = max(limit if limit is not None else (budget or 0) + trace.largest, swapping.bounded_peak)

    def alternative(chosen: Collection[int]) -> Trace:
        return recompute(trace, [call for index in sorted(chosen) for call in candidates[index].calls])

    path = _path(trace, candidates, lambda index: _least(alternative([index]), limit) <= most)
    known = {path[0]: swapping.forecast.seconds}

    def seconds(chosen: frozenset[int]) -> float:
        if chosen not in known:
            known[chosen] = float("inf")
            with suppress(LimitError):
                plan = make_plan(alternative(chosen), link, limit=limit, budget=budget)
                if plan.bounded_peak <= most:
                    known[chosen] = plan.forecast.seconds
        return known[chosen]

    # The time falls as stalls go away and rises as computation comes on top, so look closer around the best so far.
    stride = max(1, (len(path) - 1) // 8)
    best = min(range(0, len(path), stride), key=lambda at: seconds(path[at]))
    while stride := stride // 2:
        near = (at for at in (best - stride, best, best + stride) if 0 <= at < len(path))
        best = min(near, key=lambda at: seconds(path[at]))
    fewest = min((one for one in known if seconds(one) <= _EQUAL * seconds(path[best])), key=len)
    # One candidate may keep all sets that have it from fitting. So try those near the best set, too.
    for index in sorted(range(len(candidates)), key=lambda index: index not in path[-1])[:_TRIED]:
        other = _toggled(fewest, index, candidates)
        if _EQUAL * seconds(other) < seconds(fewest):
            fewest = other
    before = f"a pass computes for {_ms(trace.seconds)}, takes {_ms(seconds(path[0]))} if tensors are only swapped"
    if not fewest:
        return Choice(f"none: {before}, and no less if modules are recomputed", seconds=seconds(path[0]))
    chosen = [candidates[index] for index in sorted(fewest)]
    count = "1 module" if len(chosen) == 1 else f"{len(chosen)} modules"
    return Choice(
        f"{count}: {before}, and {_ms(seconds(fewest))} with these recomputed",
        {candidate.name: _reason(trace, link, candidate) for candidate in chosen},
        max(sum(trace.tensors[index].nbytes for index in _made(trace, call)) for one in chosen for call in one.calls),
        seconds(fewest),
    )


def _toggled(chosen: frozenset[int], index: int, candidates: Sequence[Candidate]) -> frozenset[int]:
    """The set without the candidate, or with it in the place of those within it or around it."""
    if index in chosen:
        return chosen - {index}
    others = chosen - candidates[index].within
    return frozenset({index, *(one for one in others if index not in candidates[one].within)})


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms"


def _least(trace: Trace, limit: int | None) -> int:
    """The same with all gone that can be."""
    return floor(trace)[0] if limit is not None else int(held_at(trace, find_gaps(trace)).max(initial=0))


def _path(trace: Trace, candidates: Sequence[Candidate], fits: Callable[[int], bool]) -> list[frozenset[int]]:
    """Sets of candidates from none on, each with one more: the one that saves most bytes for each second of its own.

    It takes the place of those within it.
    """
    gains = [sum(trace.tensors[index].nbytes for index in _unsaved(trace, one)) for one in candidates]
    gains = [
        gain - sum(sum(call.extra_inputs) for call in one.calls) for gain, one in zip(gains, candidates, strict=True)
    ]
    costs = [sum(call.seconds for call in one.calls) for one in candidates]
    inner = [{other for other, one in enumerate(candidates) if index in one.within} for index in range(len(candidates))]
    left = {index for index, gain in enumerate(gains) if gain > _LEAST_GAIN * trace.saved}
    chosen: set[int] = set()
    path = [frozenset(chosen)]

    def worth(index: int) -> float:
        replaced = inner[index] & chosen
        gain, cost = (of[index] - sum(of[other] for other in replaced) for of in (gains, costs))
        return gain / max(cost, 1e-9)

    while left := {index for index in left if not candidates[index].within & chosen and worth(index) > 0}:
        index = max(sorted(left), key=worth)
        left.remove(index)
        if fits(index):
            chosen = chosen - inner[index] | {index}
            path.append(frozenset(chosen))
    return path


def _made(trace: Trace, call: Call) -> set[int]:
    """The tensors that running the call again makes again."""
    saved = {trace.accesses[at].tensor for at in range(call.first, call.last)}
    return {index for index in saved.difference(call.inputs) if not trace.tensors[index].pinned}


def _unsaved(trace: Trace, candidate: Candidate) -> set[int]:
    """The tensors that the step does not save any more if the candidate is recomputed."""
    inputs = {index for call in candidate.calls for index in call.inputs}
    owned = {at for call in candidate.calls for at in range(call.first, call.last)}
    return {
        index
        for index in set[int]().union(*(_made(trace, call) for call in candidate.calls)) - inputs
        if all(at in owned for at in trace.touches[index] if trace.accesses[at].kind != "read")
    }


def _reason(trace: Trace, link: Link, candidate: Candidate) -> str:
    sizes = [trace.tensors[index].nbytes for index in _unsaved(trace, candidate)]
    copies = sum(link.seconds_out(nbytes) + link.seconds_back(nbytes) for nbytes in sizes)
    again = sum(call.seconds for call in candidate.calls)
    return f"running it again takes {_ms(again)}; copies of the {format_size(sum(sizes))} that it saves, {_ms(copies)}"


def recompute(trace: Trace, calls: Sequence[Call]) -> Trace:
    """The step in which these calls, none within another, save only their inputs, as far as it is known before it runs.

    What running them again makes is held from then on until its last use: no plan can have it leave.
    """
    owners = _owners(trace, calls)
    lingering = _lingering(trace, owners)
    tape = _Tape(
        trace, {access.tensor for access, owner in zip(trace.accesses, owners, strict=True) if owner is not None}
    )
    begun: dict[int, dict[int, int]] = {}  # calls that run again: what they make again, by what they made
    others: dict[int, list[int]] = {}
    for at, (access, owner) in enumerate(zip(trace.accesses, owners, strict=True)):
        tape.positions.append(len(tape.accesses))
        tape.compute(access.seconds, access.other and access.other + lingering[at])  # 0: not measured
        if owner is None:
            tape.touch(access.kind, access.tensor)
            continue
        call = calls[owner]
        if access.kind != "read":
            if at == call.first:
                others[owner] = [tape.new(Tensor(nbytes, None)) for nbytes in call.extra_inputs]
                for index in (*call.inputs, *others[owner]):
                    tape.touch("hold", index)
            continue
        if owner not in begun:
            for index in (*call.inputs, *others[owner]):
                tape.touch("read", index)
            forward = [one.other for one in trace.accesses[call.first : call.last]]
            tape.compute(call.seconds, access.other and access.other + max(forward) - forward[0])
            begun[owner] = {index: tape.new(trace.tensors[index]) for index in sorted(_made(trace, call))}
            for index in begun[owner].values():
                tape.touch("write", index)
        tape.touch("hold", begun[owner].get(access.tensor, access.tensor))
    return tape.trace()


def _owners(trace: Trace, calls: Sequence[Call]) -> list[int | None]:
    """For each access the call that it goes away with: the one that made it, or that saved what it reads.

    Autograd works as a stack: the first save of a tensor is read last. If a tensor is not read as often as it is
    saved, its reads are those of a call only if it made all of the saves.
    """
    owners: list[int | None] = [None] * len(trace.accesses)
    for number, call in enumerate(calls):
        owners[call.first : call.last] = [number] * (call.last - call.first)
    for index in {trace.accesses[at].tensor for call in calls for at in range(call.first, call.last)}:
        reads = trace.positions(index, "read")
        saves = [at for at in trace.touches[index] if trace.accesses[at].kind != "read"]
        if len(reads) != len(saves):
            if len({owners[at] for at in saves}) > 1:
                continue
            saves = saves[:1] * len(reads)
        for save, read in zip(saves, reversed(reads), strict=True):
            owners[read] = owners[save]
    return owners


def _lingering(trace: Trace, owners: Sequence[int | None]) -> list[int]:
    """Bytes before each access that the forward still has of tensors that it does not save any more."""
    change = np.zeros(len(trace.accesses) + 1, np.int64)
    for tensor, touches in zip(trace.tensors, trace.touches, strict=True):
        if owners[touches[0]] is not None and not tensor.pinned:
            change[touches[0] + 1] += tensor.nbytes
            change[min(max(tensor.let_go or 0, touches[0] + AT_ONCE), len(change) - 1)] -= tensor.nbytes
    lingering: list[int] = np.cumsum(change).tolist()
    return lingering


class _Tape:
    """The alternative step, written down access by access."""

    def __init__(self, old: Trace, changed: Collection[int]) -> None:
        self.old = old
        self.changed = changed  # the old tensors that have lost accesses
        self.tensors = list(old.tensors)
        self.accesses: list[Access] = []
        self.last: dict[int, int] = {}  # by tensor: the position of its last access; in the order of first ones
        self.positions: list[int] = []  # where each old access would be
        self.seconds, self.other = 0.0, 0
        self.fresh = True  # nothing was computed since the last access

    def new(self, like: Tensor) -> int:
        self.tensors.append(replace(like, let_go=None))
        return len(self.tensors) - 1

    def compute(self, seconds: float, other: int) -> None:
        self.seconds += seconds
        self.other = other if self.fresh else max(self.other, other)
        self.fresh = False

    def touch(self, kind: AccessKind, index: int) -> None:
        kind = kind if index in self.last else "write"
        self.last[index] = len(self.accesses)
        self.accesses.append(Access(kind, index, self.seconds, self.other))
        self.seconds, self.fresh = 0.0, True

    def trace(self) -> Trace:
        self.positions.append(len(self.accesses))
        self.compute(self.old.tail, self.old.tail_other)
        numbers = {index: number for number, index in enumerate(self.last)}
        return replace(
            self.old,
            tensors=tuple(self._ended(index, last + 1) for index, last in self.last.items()),
            accesses=tuple(replace(access, tensor=numbers[access.tensor]) for access in self.accesses),
            tail=self.seconds,
            tail_other=self.other,
        )

    def _ended(self, index: int, freed: int | None) -> Tensor:
        tensor = self.tensors[index]
        let_go = self.positions[tensor.let_go] if tensor.let_go is not None else None
        if index < len(self.old.tensors) and index not in self.changed:
            freed = max(freed or 0, self.positions[tensor.freed]) if tensor.freed is not None else None
        return replace(tensor, freed=freed, let_go=let_go)
