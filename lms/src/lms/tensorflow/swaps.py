"""The copies of a step, by its operations, and the most bytes that it holds with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lms.core.static import StaticSchedule
from lms.tensorflow.step import Step


@dataclass(frozen=True)
class Out:
    """A copy out. It starts once `after` is over, and `gate` waits for it. Both are indices of operations."""

    storage: int
    after: int
    gate: int | None  # None: nothing waits


@dataclass(frozen=True)
class Back:
    """A copy back for the readers from `reader` on. It starts once `trigger` and the copies out `behind` are over."""

    out: int  # index of the copy out whose bytes it reads
    trigger: int
    behind: tuple[int, ...]
    reader: int


@dataclass(frozen=True)
class Swaps:
    """Copies out, and copies back in the order in which they run. `peak` bytes are held at most, with all else.

    `surely` are the bytes that the step's tensors take at least while each operation runs.
    """

    outs: tuple[Out, ...]
    backs: tuple[Back, ...]
    peak: int
    surely: tuple[int, ...]


def plain(step: Step) -> Swaps:
    """No copies."""
    return _swaps(step, (), ())


def make_swaps(step: Step, static: StaticSchedule, *, ahead: int = -1, group: int = -1) -> Swaps:
    """The copies of `static`.

    `ahead` is the most operations that a copy back runs ahead; readers of a tensor that are at most `group` operations
    apart share one copy back. -1 leaves both as they are.
    """
    count = len(step.operations)
    chosen = []
    latest: dict[int, int] = {}  # copy out -> its latest reader
    for back in static.backs:
        assert back.out is not None
        reader = step.operation_at(back.before)
        storage = step.storages[step.tensors[back.tensor]]
        touched = max(at for at in (storage.writer, *storage.readers) if at < reader)
        # While two operations in a row need it, it is there all the time.
        if reader - touched > 1 and reader - latest.get(back.out, -count) > group:
            chosen.append((back, reader))
            latest[back.out] = reader
    kept = {index: at for at, index in enumerate(sorted(latest))}
    outs = []
    for index in kept:
        one = static.outs[index]
        gate = None if one.gate is None else step.done_with(one.gate) + 1
        while gate is not None and not (gate < count and step.operations[gate].linked):
            gate = gate + 1 if gate < count else None
        outs.append(Out(step.tensors[one.tensor], step.operation_at(one.after), gate))
    backs: list[Back] = []
    for back, reader in chosen:
        assert back.out is not None
        trigger = step.done_with(back.trigger)
        if ahead >= 0:
            trigger = max(trigger, reader - 1 - ahead)
        behind = tuple(kept[one] for one in back.behind if one in kept and one != back.out)
        backs.append(Back(kept[back.out], step.linked(min(trigger, reader - 1)), behind, reader))
    return _swaps(step, outs, backs)


def _swaps(step: Step, outs: Sequence[Out], backs: Sequence[Back]) -> Swaps:
    scratch = np.array([operation.scratch for operation in step.operations], np.int64)
    peak = step.base + int((_held(step, outs, backs) + scratch).max(initial=0))
    return Swaps(tuple(outs), tuple(backs), peak, tuple(_held(step, outs, backs, at_once=True).tolist()))


def _held(step: Step, outs: Sequence[Out], backs: Sequence[Back], *, at_once: bool = False) -> np.ndarray:
    """Bytes of the step's tensors while each operation runs: however long copies take, or if they take no time."""
    count = len(step.operations)
    change = np.zeros(count + 1, np.int64)

    def hold(nbytes: int, first: int, last: int) -> None:
        change[first] += nbytes
        change[min(last, count - 1) + 1] -= nbytes

    moves: dict[int, list[tuple[int, int]]] = {}  # storage -> (first reader, held from) of each return
    gone: dict[int, int] = {}  # storage -> the last operation beside which it may be there
    for out in outs:
        waits = 0 if at_once else count - 1 if out.gate is None else out.gate - 1
        gone[out.storage] = max(out.after, waits)
    for back in backs:
        storage = outs[back.out].storage
        if not moves.get(storage):
            gone[storage] = min(gone[storage], max(back.reader - 1, outs[back.out].after))
        moves.setdefault(storage, []).append((back.reader, back.reader if at_once else back.trigger + 1))
    for index, held in enumerate(step.storages):
        last = count - 1 if held.lasts else max(held.readers, default=held.writer)
        returns = sorted(moves.get(index, ()))
        if not returns:
            hold(held.nbytes, held.writer, last)
            continue
        forward = [reader for reader in held.readers if reader < returns[0][0]]
        hold(held.nbytes, held.writer, max([gone[index], held.writer, *forward]))
        for at, (reader, begins) in enumerate(returns):
            until = returns[at + 1][0] if at + 1 < len(returns) else count
            served = [one for one in held.readers if reader <= one < until]
            hold(held.nbytes, begins, max(served, default=reader))
    return np.cumsum(change)[:-1]
