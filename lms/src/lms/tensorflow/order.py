"""The order in which the operations of a step run once it is edited, and the most bytes that any such run holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lms.core.static import StaticSchedule
from lms.tensorflow.graph import Step


@dataclass(frozen=True)
class Token:
    """What something waits for: an operation of the step, or the copy of a storage out."""

    operation: int | None = None
    out: int | None = None


@dataclass
class Back:
    """A copy back of a storage, for its readers from the operation `reader` on."""

    storage: int
    reader: int
    tokens: list[Token]


@dataclass
class Gate:
    """A tensor that its readers get once the tokens are there; `back` is the copy back that it comes from."""

    tensor: Any
    back: int | None
    tokens: list[Token]


@dataclass
class Design:
    """The edits. `peak` bytes are held at most, in whatever order TensorFlow runs what is not ordered."""

    outs: list[int] = field(default_factory=list)  # storages
    backs: list[Back] = field(default_factory=list)
    gates: list[Gate] = field(default_factory=list)
    peak: int = 0


@dataclass
class _Held:
    nbytes: int
    writer: int  # node
    readers: set[int] = field(default_factory=set)  # nodes; it is there until all of them are over
    stays: bool = False


def make_design(step: Step, static: StaticSchedule | None, *, ahead: int | None = None) -> Design:
    """The edits that have the copies of `static` hold; None: nothing is edited, and `peak` is that of the plain step.

    `ahead` is the most operations that a copy back runs ahead.
    """
    return _Maker(step, static, ahead).run()


class _Maker:
    """Goes through the operations in the order of their creation. A node is one of the step's operations or a copy."""

    def __init__(self, step: Step, static: StaticSchedule | None, ahead: int | None) -> None:
        self.step, self.edits = step, static is not None
        self.design = Design()
        self.reach: list[int] = []  # for each node: those that are over before it is, itself among them, as bits
        self.tokens: list[Token] = []  # for each node
        self.held: list[_Held] = []
        self.fixed: list[int] = []  # for each node: bytes beside
        self.now: dict[int, int] = {}  # storage -> its entry in `held`
        self.front: list[int] = []  # nodes that all that may be waited for comes before
        self.waits: list[int] = []  # nodes that the next gate has to wait for
        self.leaving: dict[int, list[int]] = {}  # operation -> storages whose copy out is made after it
        self.waited: dict[int, list[int]] = {}  # operation -> storages whose copy out is over before it
        self.coming: dict[int, list[tuple[int, int, list[int]]]] = {}  # operation -> (storage, reader, outs)
        self.entering: dict[int, list[int]] = {}  # operation -> copies back that it is the first to read
        self.out_node: dict[int, int] = {}  # storage -> node of its copy out
        self.in_node: dict[int, int] = {}  # storage -> node of its latest copy back
        if static is not None:
            self._lay_out(static, ahead)

    def _lay_out(self, static: StaticSchedule, ahead: int | None) -> None:
        step = self.step
        used = {back.out for back in static.backs if back.out is not None}
        for index in sorted(used):
            out = static.outs[index]
            storage = step.tensors[out.tensor]
            self.leaving.setdefault(step.operation_at(out.after), []).append(storage)
            if out.gate is not None:
                self.waited.setdefault(_done_with(step, out.gate) + 1, []).append(storage)
        for back in static.backs:
            assert back.out is not None
            reader = step.operation_at(back.before)
            trigger = _done_with(step, back.trigger)
            if ahead is not None:
                trigger = max(trigger, reader - 1 - ahead)
            trigger = max(0, min(trigger, reader - 1))
            behind = [step.tensors[static.outs[one].tensor] for one in back.behind if one in used and one != back.out]
            self.coming.setdefault(trigger, []).append((step.tensors[back.tensor], reader, behind))

    def run(self) -> Design:
        step = self.step
        place = {operation.op: at for at, operation in enumerate(step.operations)}
        reached: dict[Any, int] = {}
        for op in step.live:
            before = 0
            for tensor in op.inputs:
                before |= reached.get(tensor.op, 0)
            for control in op.control_inputs:
                before |= reached.get(control, 0)
            at = place.get(op)
            reached[op] = before if at is None else self._operation(at, before)
        end = self._node(0, Token(), 0)
        for storage in step.returned:
            self.held[self.now[storage]].readers.add(end)
        self.design.peak = step.base + self._peak()
        return self.design

    def _operation(self, at: int, before: int) -> int:
        step = self.step
        operation = step.operations[at]
        for storage in operation.reads:
            if storage in self.in_node:
                before |= self.reach[self.in_node[storage]]
        if self.edits:
            self.waits += [self.out_node[storage] for storage in self.waited.get(at, ()) if storage in self.out_node]
            wanted = [node for node in (*self.front, *self.waits) if not before >> node & 1]
            gate = self._gate(at) if wanted else None
            if gate is not None:
                gate.tokens += [self.tokens[node] for node in dict.fromkeys(wanted)]
                self.waits = []
                for node in wanted:
                    before |= self.reach[node]
        node = self._node(before, Token(operation=at), operation.beside)
        for storage in operation.reads:
            self.held[self.now[storage]].readers.add(node)
        for storage in operation.writes:
            self.now[storage] = len(self.held)
            self.held.append(_Held(step.storages[storage].nbytes, node))
        if self.edits:
            if step.can_be_waited_for(operation.op):
                self._advance(node)
            self._copies(at)
        return self.reach[node]

    def _gate(self, at: int) -> Gate | None:
        """A gate through which the operation, and all that read the same tensor after it, get that tensor."""
        step = self.step
        if entering := self.entering.pop(at, None):
            gate = Gate(None, entering[0], [])
        else:
            tensor = step.gateable(step.operations[at].op, away=lambda storage: storage in self.in_node)
            if tensor is None:
                return None
            gate = Gate(tensor, None, [])
        self.design.gates.append(gate)
        return gate

    def _copies(self, at: int) -> None:
        for storage in self.leaving.get(at, ()):
            held = self.held[self.now[storage]]
            node = self._node(self.reach[held.writer], Token(out=storage), 0)
            held.readers.add(node)
            self.out_node[storage] = node
            self.design.outs.append(storage)
        for storage, reader, behind in self.coming.get(at, ()):
            outs = [self.out_node[one] for one in behind]
            before = self.reach[self.out_node[storage]]
            wanted = [one for one in dict.fromkeys((*self.front, *outs)) if not before >> one & 1]
            for one in wanted:
                before |= self.reach[one]
            node = self._node(before, Token(), 0)
            self.in_node[storage] = node
            self.now[storage] = len(self.held)
            self.held.append(_Held(self.step.storages[storage].nbytes, node))
            self.entering.setdefault(reader, []).append(len(self.design.backs))
            self.design.backs.append(Back(storage, reader, [self.tokens[one] for one in wanted]))

    def _advance(self, node: int) -> None:
        reach = self.reach[node]
        self.front = [one for one in self.front if not reach >> one & 1] + [node]

    def _node(self, before: int, token: Token, fixed: int) -> int:
        node = len(self.reach)
        self.reach.append(before | 1 << node)
        self.tokens.append(token)
        self.fixed.append(fixed)
        return node

    def _peak(self) -> int:
        """The most bytes while any node runs: all that is not known to be over, nor to begin later."""
        count = len(self.reach)
        width = count // 8 + 1
        packed = np.frombuffer(b"".join(one.to_bytes(width, "little") for one in self.reach), np.uint8)
        over = np.unpackbits(packed.reshape(count, width), axis=1, count=count, bitorder="little").astype(bool)
        np.fill_diagonal(over, False)  # [i, j]: j is over when i begins
        begins = np.ascontiguousarray(over.T)
        total = np.array(self.fixed, np.int64)
        for held in self.held:
            readers = list(held.readers or {held.writer})
            gone = begins[readers].all(axis=0)
            total += np.where(gone | over[held.writer], 0, held.nbytes)
        return int(total[:-1].max(initial=0))  # the last node is the end of all


def _done_with(step: Step, position: int) -> int:
    """The operation that is over once the access at `position` is done with; -1: none is."""
    at = step.operation_at(position)
    return at if position >= step.operations[at].done else at - 1
