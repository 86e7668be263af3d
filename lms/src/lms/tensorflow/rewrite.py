"""Editing a graph while it is traced: pairs of swaps, and the control edges that make the plan hold.

The operations of the step run in the order in which they were made, as the plan counts them. Where the data do not say
so, a control edge does.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, Protocol

import tensorflow as tf

from lms.core.static import StaticSchedule
from lms.tensorflow.graph import Step


class Tier(Protocol):
    """Makes the operations of one pair; called inside the graph that is edited."""

    def swap_out(self, tensor: Any, index: int) -> Any:
        """The handle of what left."""

    def swap_in(self, handle: Any, like: Any, index: int) -> Any:
        """The tensor again."""


@dataclass(frozen=True)
class Rewritten:
    """What was put into the graph. Bytes of one run of it."""

    outs: int
    ins: int
    nbytes: int
    peak: int  # most bytes, however long the copies take; what was there before is in it


def rewrite(
    graph: Any, step: Step, static: StaticSchedule, tier: Tier, *, ahead: int | None = None, synchronous: bool = False
) -> Rewritten:
    """Put the copies of `static` into the graph. `ahead` is the most operations that a copy back runs ahead.

    With `synchronous`, what follows a copy back's trigger waits for it too.
    """
    operations = step.operations
    used = sorted({back.out for back in static.backs if back.out is not None})
    _order(step, graph)
    outs: dict[int, Any] = {}
    change = [0] * (len(operations) + 1)
    gone: dict[int, list[tuple[int, int]]] = {}  # storage -> (first operation without it, copy out)
    for index in used:
        out = static.outs[index]
        storage = step.tensors[out.tensor]
        source = step.storages[storage].tensor
        after = operations[step.operation_at(out.after)]
        control = [] if after.op is source.op else [after.op]
        with graph.control_dependencies(control), tf.device(source.device):
            outs[index] = tier.swap_out(source, index)
        if out.gate is not None and (waits := _following(step, out.gate)) is not None:
            operations[waits].op._add_control_input(outs[index].op)
            gone.setdefault(storage, []).append((waits, index))
    fresh: dict[int, list[tuple[int, Any]]] = {}  # storage -> (first reader, the tensor), ascending
    begins: dict[int, list[tuple[int, int]]] = {}  # storage -> (when it may come, first reader)
    for number, back in enumerate(static.backs):
        assert back.out is not None
        storage = step.tensors[back.tensor]
        source = step.storages[storage].tensor
        reader = step.operation_at(back.before)
        trigger = _done_with(step, back.trigger)
        if ahead is not None:
            trigger = max(trigger, reader - 1 - ahead)
        trigger = min(trigger, reader - 1)
        control = [operations[trigger].op] if trigger >= 0 else []
        control += [outs[one].op for one in back.behind if one in outs and one != back.out]
        with graph.control_dependencies(control), tf.device(source.device):
            tensor = tier.swap_in(outs[back.out], source, number)
        if tensor.shape.rank is None or not tensor.shape.is_fully_defined():
            tensor.set_shape(source.shape)
        if synchronous and trigger + 1 < reader:
            operations[trigger + 1].op._add_control_input(tensor.op)
        fresh.setdefault(storage, []).append((reader, tensor))
        begins.setdefault(storage, []).append((trigger + 1, reader))
    _connect(step, fresh)
    for at, one in enumerate(step.storages):
        if one.movable:
            _add_spans(change, at, one, gone, begins)
    return Rewritten(
        outs=len(outs),
        ins=len(static.backs),
        nbytes=sum(step.trace.tensors[static.outs[index].tensor].nbytes for index in outs),
        peak=_peak(step, change),
    )


def _add_spans(change: list[int], index: int, storage: Any, gone: Any, begins: Any) -> None:
    """Count the operations during which the storage is there, or on its way."""
    last = max(storage.readers, default=storage.writer)
    starts = [(storage.writer, storage.writer), *begins.get(index, ())]
    for at, (begin, first) in enumerate(starts):
        following = starts[at + 1] if at + 1 < len(starts) else None
        end = last
        if following is not None:
            used = [one for one in (storage.writer, *storage.readers) if first <= one < following[1]]
            end = max(used, default=first)
            waits = [one for one, _ in gone.get(index, ()) if first <= one <= following[1]]
            if at == 0:  # it is there until its copy is waited for
                end = max(end, waits[0] - 1 if waits else following[0] - 1)
        change[begin] += storage.nbytes
        change[end + 1] -= storage.nbytes


def _peak(step: Step, change: list[int]) -> int:
    total = most = 0
    for moved, operation in zip(change, step.operations, strict=False):
        total += moved
        most = max(most, total + operation.fixed)
    return step.base + most


def _following(step: Step, position: int) -> int | None:
    """The operation that waits if what follows the access at `position` has to; None: none is left."""
    at = _done_with(step, position) + 1
    return at if at < len(step.operations) else None


def _done_with(step: Step, position: int) -> int:
    """The operation that is over once the access at `position` is done with; -1: none is."""
    at = step.operation_at(position)
    return at if position >= step.operations[at].done else at - 1


def _order(step: Step, graph: Any) -> None:
    """Have each operation of the step wait for the one before it, unless its data say so already."""
    place = {operation.op: at for at, operation in enumerate(step.operations)}
    latest: dict[Any, int] = {}  # operation -> the last of the step's that it comes after
    for op in graph.get_operations():
        after = -1
        for tensor in op.inputs:
            after = max(after, latest.get(tensor.op, -1))
        for control in op.control_inputs:
            after = max(after, latest.get(control, -1))
        at = place.get(op)
        if at is None:
            latest[op] = after
            continue
        if at and after < at - 1:
            op._add_control_input(step.operations[at - 1].op)
        latest[op] = at


def _connect(step: Step, fresh: dict[int, list[tuple[int, Any]]]) -> None:
    """Point every later reader of what came back at the tensor that came back."""
    views: dict[tuple[int, tuple[Any, ...]], Any] = {}
    readers = {storage: [reader for reader, _ in pairs] for storage, pairs in fresh.items()}
    for at, operation in enumerate(step.operations):
        for slot, tensor in enumerate(operation.op.inputs):
            storage = step.index.get(id(tensor))
            if storage is None or storage not in fresh:
                continue
            which = bisect_right(readers[storage], at) - 1
            if which < 0:
                continue
            new = fresh[storage][which][1]
            if tensor is not step.storages[storage].tensor:
                shape = tuple(tensor.shape)
                if shape != tuple(new.shape):
                    if (id(new), shape) not in views:
                        with tf.device(new.device):
                            views[id(new), shape] = tf.reshape(new, [-1 if size is None else size for size in shape])
                    new = views[id(new), shape]
            operation.op._update_input(slot, new)
