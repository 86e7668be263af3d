"""What a traced step does, as a trace for the planner: sizes from shapes, and the order in which operations were made.

An operation of the trace is one that makes or reads at least one tensor of `min_size` bytes. Its accesses are: a read
of each tensor that it needs, a write of each that it makes, and a second read of each that lives on. All that an
operation has in hand counts until it is over, and nothing leaves or comes back in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any

import tensorflow as tf
from tensorflow.python.ops.handle_data_util import get_resource_handle_data

from lms.core.trace import Access, AccessKind, Tensor, Trace
from lms.tensorflow.patterns import SHAPES, Patterns

# Their result has the memory of their first input.
VIEWS = {"Identity", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient", "EnsureShape"}
_STATELESS = {"ReadVariableOp", "Placeholder", "VarHandleOp", "StatelessWhile", "PartitionedCall"}
_INNER = {"While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase", "PartitionedCall"}
_INNER |= {"StatefulPartitionedCall"}
# Multiplications for each element of the result: those of a filter, or the length of a row.
_PRODUCTS = {"Conv2D", "Conv3D", "DepthwiseConv2dNative", "MatMul", "BatchMatMulV2", "BatchMatMulV3"}
_PRODUCTS |= {
    f"{name}Backprop{what}{version}"
    for name in ("Conv2D", "Conv3D")
    for what in ("Input", "Filter")
    for version in ("", "V2")
}
_LEAST = 2e-4  # seconds an operation: the planner takes less for accesses of one and the same


@dataclass
class Storage:
    """The memory of one tensor and of its views."""

    tensor: Any  # the tf.Tensor that it leaves from: the one that made it, or a view
    nbytes: int
    writer: int  # index of the operation that makes it
    movable: bool
    readers: list[int] = field(default_factory=list)  # indices of operations, ascending
    names: list[Any] = field(default_factory=list)  # the tf.Tensor that made it, and the views


@dataclass
class Operation:
    """One operation of the trace."""

    op: Any
    reads: list[int] = field(default_factory=list)  # storages
    writes: list[int] = field(default_factory=list)
    head: int = 0  # first position
    done: int = 0  # position from which on its results are there
    tail: int = 0  # position from which on it is over
    beside: int = 0  # bytes beside storages while it runs
    fixed: int = 0  # bytes beside movable storages while it runs


@dataclass
class Step:
    """A traced step: the operations and storages that count, and the trace of the movable ones."""

    operations: list[Operation]
    storages: list[Storage]
    index: dict[int, int]  # id of a tf.Tensor -> its storage
    trace: Trace
    tensors: list[int]  # index in the trace -> storage
    variables: int  # bytes of all variables: parameters, the optimizer's, statistics
    untouched: dict[str, int]  # kinds of things whose inside is not looked into, and how many
    unknown: int  # tensors whose size is not known before they are made
    base: int  # bytes that are there before the step
    live: list[Any]  # the operations that run, in the order in which they were made
    returned: set[int]  # storages that the step returns
    patterns: Patterns
    constant: set[Any]  # operations that TensorFlow computes once, before the first step

    def can_be_waited_for(self, op: Any) -> bool:
        """Whether something may wait for the operation."""
        return not op.outputs or self.patterns.tap(op) is not None

    def gateable(self, op: Any, away: Callable[[int], bool]) -> Any | None:
        """A tensor that the operation is the first to read, and that may be kept from its readers for a while.

        Of a storage that is `away`, readers have another tensor by then.
        """
        for tensor in op.inputs:
            if not tensor.dtype.is_floating or tensor.op in self.constant or tensor.op.type == "Placeholder":
                continue
            if id(tensor) in self.index and away(self.index[id(tensor)]):
                continue
            if self.patterns.readers(tensor)[0] is op and self.patterns.is_open(tensor):
                return tensor
        return None

    def operation_at(self, position: int) -> int:
        """Index of the operation to which a position belongs."""
        low, high = 0, len(self.operations) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self.operations[middle].head <= position:
                low = middle
            else:
                high = middle - 1
        return low


def resolved_shapes(graph: Any, given: Sequence[Any]) -> dict[str, Any]:
    """Shapes of all tensors by name, if the graph's own inputs had the shapes `given`."""
    definition = graph.as_graph_def()
    captured = {id(inner) for _, inner in graph.captures}
    inputs = [tensor for tensor in graph.inputs if id(tensor) not in captured]
    shapes = {tensor.op.name: shape for tensor, shape in zip(inputs, given, strict=True)}
    variables = {inner.op.name: _content(inner) for _, inner in graph.captures if inner.dtype == tf.resource}
    for node in definition.node:
        if node.op != "Placeholder":
            continue
        if node.name in shapes:
            node.attr["shape"].shape.CopyFrom(shapes[node.name].as_proto())
            node.attr.pop("_output_shapes", None)
        elif (content := variables.get(node.name)) is not None:
            # A placeholder for a resource does not tell the shape of what it refers to.
            node.op = "VarHandleOp"
            node.attr.clear()
            node.attr["dtype"].type = content.dtype
            node.attr["shape"].shape.CopyFrom(content.shape)
            node.attr["shared_name"].s = node.name.encode()
    other = tf.Graph()
    with other.as_default():
        tf.import_graph_def(definition, name="")
    return {tensor.name: tensor.shape for op in other.get_operations() for tensor in op.outputs}


def _content(handle: Any) -> Any | None:
    """Type and shape of the variable that a tensor is the handle of; None: it is of something else."""
    found = get_resource_handle_data(handle)
    return found.shape_and_type[0] if found is not None and len(found.shape_and_type) == 1 else None


def read_step(
    graph: Any,
    start: int,
    results: Sequence[Any],
    *,
    min_size: int,
    base: int,
    on_device: bool,
    given: Sequence[Any] | None = None,
    threshold: int = -1,
    device: str = "",
) -> Step:
    """The step that the graph's operations from number `start` on are; `results` are the tensors that it returns.

    `base` are the bytes that are there before the step. `on_device` says that it runs on another device than the
    processor: reads of variables then count as copies, as TensorFlow's own estimate has them. `given` are the shapes of
    the graph's inputs in the first batch. A storage stays if it is never idle for `threshold` operations. With a
    `device`, operations elsewhere are none of the step's.
    """
    operations = graph.get_operations()[start:]
    shapes: dict[str, Any] | None = None
    unknown = any(not tensor.shape.is_fully_defined() for op in operations for tensor in op.outputs if _plain(tensor))
    if unknown and given is not None:
        shapes = resolved_shapes(graph, given)
    running = _live(operations, results)
    live = [op for op in operations if op in running]
    patterns = Patterns(live)
    storages: list[Storage] = []
    index: dict[int, int] = {}
    found: list[Operation] = []
    fixed_reads: list[tuple[int, int]] = []  # (bytes, last reader) of variables
    variable_of: dict[int, int] = {}
    untouched: dict[str, int] = {}
    outside: set[int] = set()  # the caller's tensors and constants, and their views
    constant: set[Any] = set()  # operations that TensorFlow computes once, before the first step
    lost = 0
    returned = {id(tensor) for tensor in results}
    for op in live:
        kind = op.type
        if (device and op.device != device) or kind.startswith("Lms"):
            continue
        if kind in _INNER:
            untouched[kind] = untouched.get(kind, 0) + 1
        elif kind.startswith("TensorList"):
            untouched["TensorList"] = untouched.get("TensorList", 0) + 1
        if kind in SHAPES or patterns.is_part(op):
            continue
        if kind == "Const" or (op.inputs and all(tensor.op in constant for tensor in op.inputs)):
            constant.add(op)
        if kind in ("Placeholder", "Const"):
            outside.update(id(tensor) for tensor in op.outputs)
            continue
        if kind in VIEWS:
            source = id(op.inputs[0])
            if source in outside:
                outside.add(id(op.outputs[0]))
                continue
            if source in index:
                storage = storages[index[source]]
                storage.names.append(op.outputs[0])
                index[id(op.outputs[0])] = index[source]
                if id(op.outputs[0]) in returned or _unknown_axes(op.outputs[0]) > 1:
                    storage.movable = False
                continue
            if source in variable_of:
                variable_of[id(op.outputs[0])] = variable_of[source]
                continue
        if kind == "ReadVariableOp":
            nbytes = _nbytes(op.outputs[0], shapes)
            if nbytes is not None and nbytes >= min_size:
                variable_of[id(op.outputs[0])] = len(fixed_reads)
                fixed_reads.append((nbytes, -1))
            continue
        reads = list(dict.fromkeys(index[id(tensor)] for tensor in op.inputs if id(tensor) in index))
        made = []
        for tensor in op.outputs:
            nbytes = _nbytes(tensor, shapes)
            if nbytes is None:
                lost += _plain(tensor)
            elif nbytes >= min_size:
                made.append((tensor, nbytes))
        for tensor in op.inputs:
            if (at := variable_of.get(id(tensor))) is not None:
                fixed_reads[at] = (fixed_reads[at][0], len(found))
        if not reads and not made:
            continue
        operation = Operation(op, reads)
        for one in reads:
            storages[one].readers.append(len(found))
        for tensor, nbytes in made:
            index[id(tensor)] = len(storages)
            operation.writes.append(len(storages))
            movable = (
                op not in constant
                and id(tensor) not in returned
                and tensor.dtype.is_floating
                and _unknown_axes(tensor) <= 1
            )
            storages.append(Storage(tensor, nbytes, len(found), movable, names=[tensor]))
        found.append(operation)
    contents = [_content(inner) for _, inner in graph.captures if inner.dtype == tf.resource]
    variables = sum(
        tf.as_dtype(one.dtype).size * (tf.TensorShape(one.shape).num_elements() or 0)
        for one in contents
        if one is not None
    )
    if on_device:
        base += variables
        reads_held = [0] * (len(found) + 1)
        for nbytes, last in fixed_reads:
            reads_held[last] += nbytes
        total = 0
        for at in reversed(range(len(found))):
            total += reads_held[at]
            found[at].beside = found[at].fixed = total
    for storage in storages:
        leaving = next((one for one in storage.names if patterns.is_open(one)), None)
        if leaving is None or not all(patterns.may_split(one) for one in storage.names):
            storage.movable = False
        else:
            storage.tensor = leaving
        touches = [storage.writer, *storage.readers]
        if max((after - at for at, after in pairwise(touches)), default=0) < threshold:
            storage.movable = False
    lasting = {index[one] for one in returned if one in index}
    _count_fixed(found, storages, lasting)
    trace, tensors = _trace(found, storages, base, shapes)
    return Step(
        found,
        storages,
        index,
        trace,
        tensors,
        variables,
        untouched,
        lost,
        base,
        live,
        lasting,
        patterns,
        constant,
    )


def _count_fixed(found: Sequence[Operation], storages: Sequence[Storage], returned: set[int]) -> None:
    """Add what cannot move to the bytes beside."""
    change = [0] * (len(found) + 1)
    for index, storage in enumerate(storages):
        if not storage.movable:
            change[storage.writer] += storage.nbytes
            last = len(found) - 1 if index in returned else max(storage.readers, default=storage.writer)
            change[last + 1] -= storage.nbytes
    total = 0
    for at, operation in enumerate(found):
        total += change[at]
        operation.fixed += total


def _trace(found: list[Operation], storages: list[Storage], base: int, shapes: Any) -> tuple[Trace, list[int]]:
    numbers: dict[int, int] = {}  # storage -> index in the trace
    accesses: list[Access] = []
    freed: dict[int, int] = {}
    let_go: dict[int, int] = {}
    ending: list[int] = []
    seconds, other = 0.0, base

    def add(kind: AccessKind, storage: int, more: int = 0) -> None:
        nonlocal seconds, other
        accesses.append(Access(kind, numbers[storage], seconds, other + more))
        seconds, other = 0.0, 0

    for at, operation in enumerate(found):
        operation.head = len(accesses)
        for storage in ending:
            freed[storage] = len(accesses)
        ending = []
        # All of its time goes to its first access: the planner has nothing leave between accesses without any.
        seconds += _seconds(operation.op, shapes)
        for storage in operation.reads:
            if storages[storage].movable:
                if not other:
                    other = base + operation.fixed
                add("read", storage)
        other = max(other, base + operation.fixed)
        written = [one for one in operation.writes if storages[one].movable]
        operation.done = len(accesses)
        for done, storage in enumerate(written):
            numbers[storage] = len(numbers)
            other = max(other, base + operation.fixed)
            add("write", storage, sum(storages[one].nbytes for one in written[done:]))
            if not storages[storage].readers:
                ending.append(storage)
        operation.tail = len(accesses)
        for storage in written:
            let_go[storage] = operation.tail
        for storage in operation.reads:
            if not storages[storage].movable:
                continue
            if storages[storage].readers[-1] == at:
                ending.append(storage)
            else:
                other = max(other, base + operation.fixed)
                add("read", storage)
    end = len(accesses)
    for storage in ending:
        freed[storage] = end
    tensors = list(numbers)
    return (
        Trace(
            tuple(
                Tensor(
                    storages[one].nbytes,
                    freed[one],
                    let_go=let_go[one],
                    module=storages[one].tensor.op.name,
                    dtype=storages[one].tensor.dtype.name,
                )
                for one in tensors
            ),
            tuple(accesses),
            tail=seconds,
            tail_other=max(other, base),
        ),
        tensors,
    )


def _live(operations: Sequence[Any], results: Sequence[Any]) -> set[Any]:
    """The operations that run: those that change something, and all that they and the results need."""
    inside = set(operations)
    todo = [tensor.op for tensor in results if tensor.op in inside]
    todo += [op for op in operations if not op.outputs or (_has_effect(op))]
    live: set[Any] = set()
    while todo:
        op = todo.pop()
        if op in live or op not in inside:
            continue
        live.add(op)
        todo += [tensor.op for tensor in op.inputs]
        todo += op.control_inputs
    return live


def _has_effect(op: Any) -> bool:
    if op.type in _STATELESS or op.type.startswith(("Random", "Truncated", "Multinomial")):
        return False
    return any(tensor.dtype == tf.resource for tensor in op.inputs) or op.type in (
        "StatefulPartitionedCall",
        "PyFunc",
        "EagerPyFunc",
    )


def _plain(tensor: Any) -> bool:
    return tensor.dtype not in (tf.resource, tf.variant, tf.string)


def _unknown_axes(tensor: Any) -> int:
    return 9 if tensor.shape.rank is None else sum(size is None for size in tensor.shape)


def _nbytes(tensor: Any, shapes: dict[str, Any] | None) -> int | None:
    if not _plain(tensor):
        return None
    shape = tensor.shape
    if shapes is not None and not shape.is_fully_defined():
        shape = shapes.get(tensor.name, shape)
    return tensor.dtype.size * shape.num_elements() if shape.is_fully_defined() else None


def _seconds(op: Any, shapes: dict[str, Any] | None) -> float:
    """Roughly what an operation takes: only the order of such figures decides which tensors move."""
    sizes = [_nbytes(tensor, shapes) or 0 for tensor in (*op.inputs, *op.outputs)]
    seconds = _LEAST + sum(sizes) / 4e9
    if op.type in _PRODUCTS:
        seconds += prod(sorted(sizes)[-3:]) ** 0.5 / 2e11 if len(sizes) > 2 else 0.0
    return seconds
