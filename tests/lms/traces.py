"""Passes for the planner's tests: chains, shapes of known networks, and random ones for hypothesis.

A folder of tests is no package, so the tests get this module as the fixture `traces` (conftest.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from lms.core.schedule import Swap
from lms.core.trace import Access, AccessKind, Kind, Tensor
from lms.link import Link
from lms.trace import Trace

MB = 10**6
INSTANT = Link("instant", float("inf"), float("inf"), 0.0)


@dataclass
class Tape:
    """A pass that is written down access by access."""

    sizes: list[int] = field(default_factory=list)
    accesses: list[Access] = field(default_factory=list)
    freed: dict[int, int] = field(default_factory=dict)  # if that is not the access after the last one
    let_go: dict[int, int] = field(default_factory=dict)
    pinned: set[int] = field(default_factory=set)
    state: set[int] = field(default_factory=set)  # the optimizer's: it lives on in the next step
    _touches: dict[int, list[int]] = field(default_factory=dict)

    def new(self, nbytes: int) -> int:
        self.sizes.append(nbytes)
        return len(self.sizes) - 1

    def access(self, kind: AccessKind, record: int, seconds: float) -> None:
        self._touches.setdefault(record, []).append(len(self.accesses))
        self.accesses.append(Access(kind, record, seconds))

    def touches(self, record: int) -> tuple[int, ...]:
        return tuple(self._touches[record])

    def trace(self, *, base: int = 0, scratch: Sequence[int] = (), tail: float = 0.0) -> Trace:
        """The pass; with `base` the rest of the device's bytes is measured: base, scratch, and what is made next."""
        tensors = tuple(
            Tensor(
                nbytes,
                freed=None if index in self.state else self.freed.get(index, self.touches(index)[-1] + 1),
                kind="optimizer" if index in self.state else "activation",
                let_go=self.let_go.get(index),
                pinned=index in self.pinned,
                module=f"layer{index}",
            )
            for index, nbytes in enumerate(self.sizes)
        )
        accesses = tuple(self.accesses)
        if base:
            extra = [*scratch, *[0] * (len(accesses) + 1 - len(scratch))]
            for index, tensor in enumerate(tensors):
                extra[self.touches(index)[0]] += 0 if tensor.pinned else self.sizes[index]
            accesses = tuple(
                Access(access.kind, access.tensor, access.seconds, base + more)
                for access, more in zip(accesses, extra, strict=False)
            )
            return Trace(tensors, accesses, tail=tail, tail_other=base + extra[-1])
        return Trace(tensors, accesses, tail=tail)


def chain(sizes: Sequence[int], forward: Sequence[float], *, base: int = 0, scratch: Sequence[int] = ()) -> Trace:
    """Each layer saves one record; the backward takes twice as long and uses them in the opposite order."""
    tape = Tape(list(sizes))
    for index, seconds in enumerate(forward):
        tape.access("write", index, seconds)
    before = 0.0
    for index in reversed(range(len(sizes))):
        tape.access("read", index, before)
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
        tape.access("write", stream, 0.001)
        backward.append((stream, 0.002))
        for nbytes, seconds in ((24, 0.01), (8, 0.02), (8, 0.004), (32, 0.012), (32, 0.003), (8, 0.012)):
            record = tape.new(nbytes * MB)
            tape.access("write", record, seconds)
            backward.append((record, 2 * seconds))
        tape.access("hold", stream, 0.001)
        backward.append((stream, 0.002))
    logits = tape.new(120 * MB)
    tape.access("write", logits, 0.05)
    backward.append((logits, 0.1))
    before = 0.0
    for record, seconds in reversed(backward):
        tape.access("read", record, before)
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
    that are freed long after their last access.
    """
    tape = Tape()
    stack: list[int] = []  # one entry a save, as autograd's graph
    for _ in range(draw(st.integers(1, 8))):
        again = bool(stack) and draw(st.integers(0, 3)) == 0
        record = draw(st.sampled_from(stack)) if again else tape.new(draw(SIZES))
        tape.access("hold" if again else "write", record, draw(SECONDS))
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
            tape.access("read", record, draw(SECONDS))
            if draw(st.integers(0, 5)) == 0:  # a checkpoint: computed anew, and used at once
                inner = [tape.new(draw(SIZES)) for _ in range(draw(st.integers(1, 3)))]
                for again in inner:
                    tape.access("write", again, draw(SECONDS))
                for again in reversed(inner):
                    tape.access("read", again, draw(SECONDS))
    end = len(tape.accesses)
    for record in range(forward):
        saves = [at for at in tape.touches(record) if tape.accesses[at].kind != "read"]
        last = tape.touches(record)[-1]
        if draw(st.integers(0, 3)) == 0:
            tape.freed[record] = draw(st.integers(last + 1, end))
        if draw(st.booleans()):
            tape.let_go[record] = draw(st.integers(saves[-1] + 1, tape.freed.get(record, last + 1)))
    if not measured:
        return tape.trace(tail=draw(SECONDS))
    scratch = draw(st.lists(st.integers(0, 30), min_size=end + 1, max_size=end + 1))
    return tape.trace(base=draw(st.integers(1, 50)), scratch=scratch, tail=draw(SECONDS))


def reads(trace: Trace, index: int) -> tuple[int, ...]:
    return trace.positions(index, "read")


def is_live(trace: Trace, index: int, at: int) -> bool:
    """Whether a tensor that does not live on is there at an access, unless somebody moved it."""
    freed = trace.tensors[index].freed
    assert freed is not None
    return trace.touches[index][0] <= at < freed


def required(trace: Trace, moves: Sequence[Swap]) -> list[int]:
    """Bytes of the tensors that must be present at each access: all live ones but those that a move has away.

    Counted tensor by tensor and access by access, with nothing of the planner's or the simulator's in it.
    """
    return [
        sum(
            tensor.nbytes
            for index, tensor in enumerate(trace.tensors)
            if not tensor.pinned
            and is_live(trace, index, at)
            and not any(move.tensor == index and move.after < at < move.before and not move.stays for move in moves)
        )
        for at in range(len(trace.accesses))
    ]


def resting(trace: Trace) -> int:
    """The most bytes that are present even if each tensor is away from the forward's last hold to its next read."""
    totals = []
    for at in range(len(trace.accesses)):
        total = 0
        for index, tensor in enumerate(trace.tensors):
            if tensor.pinned or not is_live(trace, index, at):
                continue
            first_use = reads(trace, index)[0] if reads(trace, index) else tensor.freed
            saves = [save for save in trace.touches[index] if trace.accesses[save].kind != "read" and save < first_use]
            held_until = max([tensor.let_go or 0, *(save + 1 for save in saves)])
            total += 0 if held_until <= at < first_use else tensor.nbytes
        totals.append(total)
    return max(totals)


def moves_of(trace: Trace, away: Sequence[int], cap: Sequence[int]) -> tuple[Swap, ...]:
    """Moves of a stack pass that has the tensors `away` out: written at once, back as early as the caps allow."""
    held = [
        sum(
            tensor.nbytes
            for index, tensor in enumerate(trace.tensors)
            if is_live(trace, index, at)
            and not (index in away and trace.touches[index][0] < at < reads(trace, index)[0])
        )
        for at in range(len(trace.accesses))
    ]
    moves = []
    earliest = len(trace.tensors)  # the backward's first read
    for index in sorted(away, reverse=True):
        nbytes, written, use = trace.tensors[index].nbytes, trace.touches[index][0], reads(trace, index)[0]
        reload = use
        while reload > max(earliest, written + 1) and held[reload - 1] + nbytes <= cap[reload - 1]:
            reload -= 1
        for at in range(reload, use):
            held[at] += nbytes
        earliest = reload
        moves.append(Swap(index, written, use, reload, True))
    return tuple(sorted(moves, key=lambda move: move.after))


def kept(trace: Trace, away: Sequence[int]) -> list[int]:
    """Bytes that stay at each access of a stack pass, the tensor in hand left out."""
    return [
        sum(
            tensor.nbytes
            for index, tensor in enumerate(trace.tensors)
            if index not in away and index != access.tensor and is_live(trace, index, at)
        )
        for at, access in enumerate(trace.accesses)
    ]


@st.composite
def steps(draw: st.DrawFn, *, measured: bool = False) -> Trace:
    """Cyclic steps: parameters, gradients and the optimizer's state beside activations.

    The forward and the backward read the parameters, the backward writes the gradients, and the optimizer reads them
    and its state, and writes state and parameters. Gradients are freed after that, or live on and are added to.
    """
    tensors: list[Tensor] = []
    accesses: list[Access] = []

    def new(kind: Kind, freed: int | None) -> int:
        tensors.append(Tensor(draw(SIZES), freed=freed, kind=kind, pinned=draw(st.integers(0, 9)) == 0))
        return len(tensors) - 1

    def touch(kind: AccessKind, tensor: int) -> None:
        accesses.append(Access(kind, tensor, draw(SECONDS)))

    layers = range(draw(st.integers(1, 4)))
    parameters = [new("parameter", None) for _ in layers]
    states = [[new("optimizer", None) for _ in range(draw(st.integers(0, 2)))] for _ in layers]
    frozen = {layer for layer in layers if draw(st.integers(0, 3)) == 0}
    living = draw(st.booleans())  # gradients live on
    activations: list[int] = []
    for layer in layers:
        touch("read", parameters[layer])
        activations.append(new("activation", -1))
        touch("write", activations[layer])
    gradients: dict[int, int] = {}
    for layer in reversed(layers):
        touch("read", activations[layer])
        touch("read", parameters[layer])
        if layer not in frozen:
            gradients[layer] = new("gradient", None if living else -1)
            touch("write", gradients[layer])
            if draw(st.integers(0, 3)) == 0:
                touch("write", gradients[layer])  # of a parameter that two layers share
    for layer in draw(st.permutations(sorted(gradients))):
        touch("read", gradients[layer])
        for state in states[layer]:
            touch("read", state)
            touch("write", state)
        touch("write", parameters[layer])
    end = len(accesses)
    touched: dict[int, int] = {access.tensor: at for at, access in enumerate(accesses)}
    tensors = [
        replace(tensor, freed=draw(st.sampled_from([touched[index] + 1, end]))) if tensor.freed == -1 else tensor
        for index, tensor in enumerate(tensors)
    ]
    # State that nothing touched (of a frozen layer) is no tensor of the step.
    numbers = {index: number for number, index in enumerate(sorted(touched))}
    tensors = [tensors[index] for index in numbers]
    base = draw(st.integers(1, 50)) if measured else 0
    others = [base + draw(st.integers(0, 30)) if measured else 0 for _ in range(end + 1)]
    return Trace(
        tuple(tensors),
        tuple(
            replace(access, tensor=numbers[access.tensor], other=other)
            for access, other in zip(accesses, others, strict=False)
        ),
        tail=draw(SECONDS),
        tail_other=others[-1],
    )
