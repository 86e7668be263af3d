"""Passes for the planner's tests: chains, shapes of known networks, and random ones for hypothesis.

A folder of tests is no package, so the tests get this module as the fixture `traces` (conftest.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from hypothesis import strategies as st

from lms.core.schedule import Move
from lms.core.trace import Access, Record
from lms.link import Link
from lms.trace import Trace

MB = 10**6
INSTANT = Link("instant", float("inf"), float("inf"), 0.0)


@dataclass
class Tape:
    """A pass that is written down access by access."""

    sizes: list[int] = field(default_factory=list)
    accesses: list[Access] = field(default_factory=list)
    freed: dict[int, int] = field(default_factory=dict)  # where that is not the access after the last one
    let_go: dict[int, int] = field(default_factory=dict)
    pinned: set[int] = field(default_factory=set)

    def new(self, nbytes: int) -> int:
        self.sizes.append(nbytes)
        return len(self.sizes) - 1

    def access(self, kind: Literal["save", "use"], record: int, seconds: float) -> None:
        self.accesses.append(Access(kind, record, seconds))

    def touches(self, record: int, kind: str) -> tuple[int, ...]:
        return tuple(at for at, a in enumerate(self.accesses) if a.record == record and a.kind == kind)

    def trace(self, *, base: int = 0, scratch: Sequence[int] = (), tail: float = 0.0) -> Trace:
        """The pass; with `base` the rest of the device's bytes is measured: base, scratch, and what is made next."""
        touched: dict[str, dict[int, list[int]]] = {"save": defaultdict(list), "use": defaultdict(list)}
        for at, access in enumerate(self.accesses):
            touched[access.kind][access.record].append(at)
        saves, uses = touched["save"], touched["use"]
        records = tuple(
            Record(
                nbytes,
                tuple(saves[index]),
                tuple(uses[index]),
                freed=self.freed.get(index, max(saves[index] + uses[index]) + 1),
                let_go=self.let_go.get(index),
                pinned=index in self.pinned,
                module=f"layer{index}",
            )
            for index, nbytes in enumerate(self.sizes)
        )
        accesses = tuple(self.accesses)
        if base:
            extra = [*scratch, *[0] * (len(accesses) + 1 - len(scratch))]
            for index, record in enumerate(records):
                extra[record.saves[0]] += 0 if record.pinned else self.sizes[index]
            accesses = tuple(
                Access(access.kind, access.record, access.seconds, base + more)
                for access, more in zip(accesses, extra, strict=False)
            )
            return Trace(records, accesses, tail=tail, tail_other=base + extra[-1])
        return Trace(records, accesses, tail=tail)


def chain(sizes: Sequence[int], forward: Sequence[float], *, base: int = 0, scratch: Sequence[int] = ()) -> Trace:
    """Each layer saves one record; the backward takes twice as long and uses them in the opposite order."""
    tape = Tape(list(sizes))
    for index, seconds in enumerate(forward):
        tape.access("save", index, seconds)
    before = 0.0
    for index in reversed(range(len(sizes))):
        tape.access("use", index, before)
        before = 2 * forward[index]
    return tape.trace(base=base, scratch=scratch, tail=before)


def unet(*, base: int = 0) -> Trace:
    """Few huge records early and late, small ones between: four levels of a 3D U-Net, six records each way."""
    levels = [0, 1, 2, 3, 2, 1, 0]
    sizes = [64 * MB // 4**level for level in levels for _ in range(6)]
    return chain(sizes, [0.05 / 4**level for level in levels for _ in range(6)], base=base)


def resnet(*, base: int = 0) -> Trace:
    """Four stages of 3, 4, 6 and 3 blocks, each stage's records half as large as those of the one before."""
    sizes, forward = [], []
    for blocks, nbytes in ((3, 32), (4, 16), (6, 8), (3, 4)):
        for at in range(9 * blocks):
            sizes.append(nbytes * MB // (4 if at % 9 < 6 else 1))
            forward.append(0.01 if at % 3 == 0 else 0.002)
    return chain(sizes, forward, base=base)


def gpt(*, layers: int = 12, base: int = 0) -> Trace:
    """Equal layers with wide records inside, a residual stream that each saves twice, and large logits at the end."""
    tape = Tape()
    backward: list[tuple[int, float]] = []
    for _ in range(layers):
        stream = tape.new(8 * MB)
        tape.access("save", stream, 0.001)
        backward.append((stream, 0.002))
        for nbytes, seconds in ((24, 0.01), (8, 0.02), (8, 0.004), (32, 0.012), (32, 0.003), (8, 0.012)):
            record = tape.new(nbytes * MB)
            tape.access("save", record, seconds)
            backward.append((record, 2 * seconds))
        tape.access("save", stream, 0.001)
        backward.append((stream, 0.002))
    logits = tape.new(120 * MB)
    tape.access("save", logits, 0.05)
    backward.append((logits, 0.1))
    before = 0.0
    for record, seconds in reversed(backward):
        tape.access("use", record, before)
        before = seconds
    return tape.trace(base=base, tail=before)


SECONDS = st.sampled_from([0.0, 0.25, 0.5, 1.0, 2.0])
SIZES = st.integers(1, 64)
RATES = st.sampled_from([0.5, 2.0, 8.0, 32.0, 1000.0])
LINKS = st.builds(Link, st.just("random"), RATES, RATES, st.sampled_from([0.0, 0.25]))


@st.composite
def stacks(draw: st.DrawFn, *, measured: bool = False) -> Trace:
    """Plain passes: each record saved once, used once in the opposite order, and freed."""
    sizes = draw(st.lists(SIZES, min_size=1, max_size=10))
    forward = draw(st.lists(SECONDS, min_size=len(sizes), max_size=len(sizes)))
    if not measured:
        return chain(sizes, forward)
    accesses = 2 * len(sizes) + 1
    scratch = draw(st.lists(st.integers(0, 30), min_size=accesses, max_size=accesses))
    return chain(sizes, forward, base=draw(st.integers(1, 50)), scratch=scratch)


@st.composite
def passes(draw: st.DrawFn, *, measured: bool = False) -> Trace:
    """Passes with whatever real ones have.

    Records that several operations save and use, dropped branches, records that another owner keeps for a while or
    for good, records saved within the backward (checkpointing), a second backward over the same graph, and records
    that are freed long after their last use.
    """
    tape = Tape()
    stack: list[int] = []  # one entry a save, as autograd's graph
    for _ in range(draw(st.integers(1, 8))):
        record = draw(st.sampled_from(stack)) if stack and draw(st.integers(0, 3)) == 0 else tape.new(draw(SIZES))
        tape.access("save", record, draw(SECONDS))
        stack.append(record)
    forward = len(tape.sizes)
    for record in range(forward):
        if draw(st.integers(0, 5)) == 0:
            tape.pinned.add(record)
    dropped = {record for record in range(forward) if draw(st.integers(0, 6)) == 0}
    sweeps = draw(st.sampled_from([1, 1, 1, 2]))
    for _ in range(sweeps):
        for record in reversed(stack):
            if record in dropped:
                continue
            tape.access("use", record, draw(SECONDS))
            if draw(st.integers(0, 5)) == 0:  # a checkpoint: computed anew, and used at once
                inner = [tape.new(draw(SIZES)) for _ in range(draw(st.integers(1, 3)))]
                for again in inner:
                    tape.access("save", again, draw(SECONDS))
                for again in reversed(inner):
                    tape.access("use", again, draw(SECONDS))
    end = len(tape.accesses)
    for record in range(forward):
        saves = tape.touches(record, "save")
        last = max(saves + tape.touches(record, "use"))
        if draw(st.integers(0, 3)) == 0:
            tape.freed[record] = draw(st.integers(last + 1, end))
        if draw(st.booleans()):
            tape.let_go[record] = draw(st.integers(saves[-1] + 1, tape.freed.get(record, last + 1)))
    if not measured:
        return tape.trace(tail=draw(SECONDS))
    scratch = draw(st.lists(st.integers(0, 30), min_size=end + 1, max_size=end + 1))
    return tape.trace(base=draw(st.integers(1, 50)), scratch=scratch, tail=draw(SECONDS))


def required(trace: Trace, moves: Sequence[Move]) -> list[int]:
    """Bytes of the records that must be present at each access: all live ones but those that a move has away.

    Counted record by record and access by access, with nothing of the planner's or the simulator's in it.
    """
    return [
        sum(
            record.nbytes
            for index, record in enumerate(trace.records)
            if not record.pinned
            and record.saves[0] <= at < record.freed
            and not any(move.record == index and move.after < at < move.before for move in moves)
        )
        for at in range(len(trace.accesses))
    ]


def resting(trace: Trace) -> int:
    """The most bytes that are present even if each record is away from the forward's last hold to its next use."""
    totals = []
    for at in range(len(trace.accesses)):
        total = 0
        for record in trace.records:
            if record.pinned or not record.saves[0] <= at < record.freed:
                continue
            first_use = record.uses[0] if record.uses else record.freed
            held_until = max([record.let_go or 0, *(save + 1 for save in record.saves if save < first_use)])
            total += 0 if held_until <= at < first_use else record.nbytes
        totals.append(total)
    return max(totals)


def moves_of(trace: Trace, away: Sequence[int], cap: Sequence[int]) -> tuple[Move, ...]:
    """Moves of a stack pass that has the records `away` out: written at once, back as early as the caps allow."""
    held = [
        sum(
            record.nbytes
            for index, record in enumerate(trace.records)
            if record.saves[0] <= at < record.freed and not (index in away and record.saves[0] < at < record.uses[0])
        )
        for at in range(len(trace.accesses))
    ]
    moves = []
    earliest = len(trace.records)  # the backward's first use
    for index in sorted(away, reverse=True):
        record = trace.records[index]
        use = record.uses[0]
        fetch = use
        while fetch > max(earliest, record.saves[0] + 1) and held[fetch - 1] + record.nbytes <= cap[fetch - 1]:
            fetch -= 1
        for at in range(fetch, use):
            held[at] += record.nbytes
        earliest = fetch
        moves.append(Move(index, record.saves[0], use, fetch, True))
    return tuple(sorted(moves, key=lambda move: move.after))


def kept(trace: Trace, away: Sequence[int]) -> list[int]:
    """Bytes that stay at each access of a stack pass, the record in hand left out."""
    return [
        sum(
            record.nbytes
            for index, record in enumerate(trace.records)
            if index not in away and index != access.record and record.saves[0] <= at < record.freed
        )
        for at, access in enumerate(trace.accesses)
    ]
