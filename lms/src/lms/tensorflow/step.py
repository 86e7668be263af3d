"""What a step does, as a trace for the planner: sizes from shapes, and the order in which its operations will run.

An operation of the trace is one that makes or reads at least one tensor of `min_size` bytes. Its accesses are: a read
of each tensor that it needs, a write of each that it makes, and a second read of each that lives on. All that an
operation has in hand counts until it is over, and nothing leaves or comes back in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

from lms.core.trace import Access, AccessKind, Tensor, Trace
from lms.tensorflow.graph import CONTROL_FLOW, SHAPES, Node
from lms.tensorflow.traced import Known, Output, as_built

# Their result has the memory of their first input.
VIEWS = {"Identity", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient", "EnsureShape", "Snapshot"}
VIEWS |= {"CheckNumerics"}
_OUTSIDE = {"_Arg", "Placeholder", "Const", "VarHandleOp", "_Recv", "_HostRecv"}
# What the optimizers put in place of operations: results are as large as the largest input, or less.
_ELEMENTWISE = {"Add", "AddV2", "AddN", "_MklNativeAddN", "Sub", "Mul", "RealDiv", "Neg", "Square", "Transpose", "Cast"}
# Multiplications for each element of the result: those of a filter, or the length of a row.
_PRODUCTS = ("Conv", "MatMul", "Einsum")
_LEAST = 2e-4  # seconds an operation: the planner takes less for accesses of one and the same


@dataclass(eq=False)
class Storage:
    """The memory of one tensor and of its views."""

    source: tuple[str, int]  # the node that makes it, and which output
    output: Output
    nbytes: int
    writer: int  # index of the operation that makes it
    movable: bool
    readers: list[int] = field(default_factory=list)  # indices of operations, ascending
    lasts: bool = False  # something may have it after the last reader


@dataclass(eq=False)
class Operation:
    """One operation of the trace."""

    node: Node
    linked: bool  # whether others wait for it, and it for them
    reads: list[int] = field(default_factory=list)  # storages
    writes: list[int] = field(default_factory=list)
    head: int = 0  # first position
    done: int = 0  # position from which on its results are there
    tail: int = 0  # position from which on it is over
    fixed: int = 0  # bytes beside movable storages while it runs
    scratch: int = 0  # of them: the most that it may need inside


@dataclass(eq=False)
class Step:
    """The operations and storages that count, and the trace of the movable ones."""

    operations: list[Operation]
    storages: list[Storage]
    views: dict[str, Node]  # nodes that hand a storage on
    where: dict[tuple[str, int], int]  # tensor -> its storage
    trace: Trace
    tensors: list[int]  # index in the trace -> storage
    base: int  # bytes that are there before the step
    device: str

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

    def linked(self, at: int) -> int:
        """The last operation in the row up to `at`; 0 if there is none."""
        while at > 0 and not self.operations[at].linked:
            at -= 1
        return max(at, 0)

    def done_with(self, position: int) -> int:
        """The operation that is over once the access at `position` is done with; -1: none is."""
        at = self.operation_at(position)
        return at if position >= self.operations[at].done else at - 1


def read_step(
    nodes: Sequence[Node],
    mark: Node,
    known: Known,
    prefix: str,
    *,
    min_size: int,
    base: int,
    on_device: bool = False,
    threshold: int = -1,
    scratch: Mapping[str, int] | None = None,
) -> Step:
    """The step in which `mark` stands, from the nodes in their order; names of what was traced begin with `prefix`.

    `base` are the bytes that are there before the step. `on_device` says that it runs on another device than the
    processor: reads of variables then count as copies, as TensorFlow's own estimate has them. A storage stays if it is
    never idle for `threshold` operations. `scratch` are the most bytes that operations need inside, by their names
    after `prefix`: an operation that it does not name may need as much as any.
    """
    reader = _Reader(mark, known, prefix, min_size, on_device)
    for node in nodes:
        reader.read(node)
    operations, storages = reader.operations, reader.storages
    for storage in storages:
        touches = [storage.writer, *storage.readers]
        if storage.lasts or max((after - at for at, after in pairwise(touches)), default=0) < threshold:
            storage.movable = False
    if scratch:
        most = max(scratch.values())
        for operation in operations:
            operation.scratch = scratch.get(operation.node.name.removeprefix(prefix), most)
    _count_fixed(operations, storages)
    trace, tensors = _trace(operations, storages, base)
    return Step(operations, storages, reader.views, reader.where, trace, tensors, base, mark.definition.device)


class _Reader:
    def __init__(self, mark: Node, known: Known, prefix: str, min_size: int, on_device: bool) -> None:
        self.mark, self.known, self.prefix = mark, known, prefix
        self.min_size, self.on_device = min_size, on_device
        self.operations: list[Operation] = []
        self.storages: list[Storage] = []
        self.views: dict[str, Node] = {}
        self.where: dict[tuple[str, int], int] = {}
        self.constant: set[str] = set()  # nodes that TensorFlow may compute once, before the first step

    def read(self, node: Node) -> None:
        """Take in the next node."""
        reads = list(dict.fromkeys(self.where[one] for one in node.inputs if one in self.where))
        if not self._is_inside(node):
            for storage in reads:
                self.storages[storage].lasts = True
            return
        if node.op == "Const" or (node.inputs and all(name in self.constant for name, _ in node.inputs)):
            self.constant.add(node.name)
        if node.op in _OUTSIDE or (node.op == "ReadVariableOp" and not self.on_device):
            return
        if node.op == "IdentityN":
            for slot, one in enumerate(node.inputs):
                if one in self.where:
                    self.where[node.name, slot] = self.where[one]
                    self.views[node.name] = node
            return
        if node.op in VIEWS:
            if node.inputs[0] in self.where:
                self.where[node.name, 0] = self.where[node.inputs[0]]
                self.views[node.name] = node
            return
        at = len(self.operations)
        writes = []
        for slot, output in enumerate(self._outputs(node, reads)):
            if output.nbytes is None or output.nbytes < self.min_size:
                continue
            self.where[node.name, slot] = len(self.storages)
            writes.append(len(self.storages))
            movable = output.floating and node.op != "ReadVariableOp" and node.name not in self.constant
            self.storages.append(Storage((node.name, slot), output, output.nbytes, at, movable))
        if not reads and not writes:
            return
        linked = _may_wait(node)
        for storage in reads:
            self.storages[storage].readers.append(at)
            self.storages[storage].lasts |= not linked
        self.operations.append(Operation(node, linked, reads, writes))

    def _is_inside(self, node: Node) -> bool:
        """Whether the node runs whenever the step does, once, on its device."""
        mark = self.mark
        return (
            node.frame == mark.frame
            and node.conditions <= mark.conditions
            and node.definition.device == mark.definition.device
            and node.op not in CONTROL_FLOW
            and node.op not in ("_Retval", "_Send", "_HostSend")
        )

    def _outputs(self, node: Node, reads: Iterable[int]) -> Sequence[Output]:
        if node.op in SHAPES or node.op == "NoOp":  # of a call that was replaced, a NoOp is left
            return ()
        if node.name.startswith(self.prefix):
            name = node.name[len(self.prefix) :]
            if name in self.known.outputs:
                return as_built(node.definition, self.known.outputs[name])
        largest = max((self.storages[one] for one in reads), key=lambda one: one.nbytes, default=None)
        if largest is None or node.op not in _ELEMENTWISE:
            return ()
        return as_built(node.definition, (largest.output,))


def _may_wait(node: Node) -> bool:
    """Whether the node may be put in a row: what talks to other processes or to Python has an order of its own."""
    return not node.op.startswith(("Collective", "Nccl", "Ddl", "Horovod", "PyFunc", "EagerPyFunc", "Lms"))


def _count_fixed(operations: Sequence[Operation], storages: Sequence[Storage]) -> None:
    """Count what cannot move."""
    change = [0] * (len(operations) + 1)
    for storage in storages:
        if not storage.movable:
            change[storage.writer] += storage.nbytes
            last = len(operations) - 1 if storage.lasts else max(storage.readers, default=storage.writer)
            change[last + 1] -= storage.nbytes
    total = 0
    for at, operation in enumerate(operations):
        total += change[at]
        operation.fixed = total + operation.scratch


def _trace(operations: Sequence[Operation], storages: Sequence[Storage], base: int) -> tuple[Trace, list[int]]:
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

    for at, operation in enumerate(operations):
        operation.head = len(accesses)
        for storage in ending:
            freed[storage] = len(accesses)
        ending = []
        # All of its time goes to its first access: the planner has nothing leave between accesses without any.
        seconds += _seconds(operation, storages)
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
                Tensor(storages[one].nbytes, freed[one], let_go=let_go[one], module=storages[one].source[0])
                for one in tensors
            ),
            tuple(accesses),
            tail=seconds,
            tail_other=max(other, base),
        ),
        tensors,
    )


def _seconds(operation: Operation, storages: Sequence[Storage]) -> float:
    """Roughly what an operation takes: only the order of such figures decides which tensors move."""
    sizes = [storages[one].nbytes for one in (*operation.reads, *operation.writes)]
    seconds = _LEAST + sum(sizes) / 4e9
    if any(kind in operation.node.op for kind in _PRODUCTS):
        seconds += prod(sorted(sizes)[-3:]) ** 0.5 / 2e11 if len(sizes) > 2 else 0.0
    return seconds
