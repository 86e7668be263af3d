"""Putting copies into a graph, and its operations in a row."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, Protocol

from lms.tensorflow.step import Step
from lms.tensorflow.swaps import Swaps


class Tier(Protocol):
    """Names the operations of a pair, and the device that they run on."""

    out_op: str
    back_op: str

    def device(self, own: str) -> str:
        """The device of a pair whose tensor is on `own`."""


def edit(definition: Any, step: Step, swaps: Swaps, tier: Tier, name: str, *, plan: int, ordered: bool = False) -> None:
    """Edit the GraphDef: the copies of `swaps`, and control edges with which its peak holds.

    Names of what is added begin with `name`, and the copies carry the number of the `plan`. If nothing is copied, there
    are edges only if it is to be `ordered`.
    """
    if swaps.outs or ordered:
        _Editor(definition, step, swaps, tier, name, plan).run()


@dataclass
class _Return:
    reader: int
    tensor: str  # as an input names it


class _Editor:
    def __init__(self, definition: Any, step: Step, swaps: Swaps, tier: Tier, name: str, plan: int) -> None:
        self.definition, self.step, self.swaps, self.tier, self.name = definition, step, swaps, tier, name
        self.plan = plan
        self.made = 0

    def run(self) -> None:
        step, swaps = self.step, self.swaps
        outs = [self._out(out.storage, out.after) for out in swaps.outs]
        gates: dict[int, list[str]] = {}
        for out, node in zip(swaps.outs, outs, strict=True):
            if out.gate is not None:
                gates.setdefault(out.gate, []).append(node)
        returns: dict[int, list[_Return]] = {}  # storage -> in the order of their readers
        before = ""
        for back in swaps.backs:
            storage = swaps.outs[back.out].storage
            controls = [outs[one] for one in back.behind] + ([before] if before else [])
            before = self._back(storage, outs[back.out], [self._ending(back.trigger), *controls])
            returns.setdefault(storage, []).append(_Return(back.reader, before))
        for found in returns.values():
            found.sort(key=lambda one: one.reader)
        self._connect(returns)
        self._hold_for_sums(gates)
        row = None
        for at, operation in enumerate(step.operations):
            controls = list(gates.get(at, ()))
            if operation.linked:
                if row is not None:
                    controls.append(row)
                row = operation.node.name
            operation.node.definition.input.extend(f"^{one}" for one in controls)

    def _hold_for_sums(self, gates: dict[int, list[str]]) -> None:
        """Hold what a sum of three or more does not overwrite in plain training, until the sum is over.

        AddN adds into the first of its inputs that nothing else refers to, and begins with that one. In plain training
        later readers refer to a tensor. If it moves, they read another.
        """
        moved = {out.storage for out in self.swaps.outs}
        for at, operation in enumerate(self.step.operations):
            definition = operation.node.definition
            if definition.op != "AddN" or len(operation.node.inputs) < 3:
                continue
            for slot, tensor in enumerate(operation.node.inputs):
                storage = self.step.where.get(tensor)
                if storage is None or storage not in moved:
                    continue
                held = self.step.storages[storage]
                later = next((reader for reader in held.readers if reader > at), None)
                if later is None:
                    continue
                holder = self._add("Identity", self.step.device, [definition.input[slot]], [definition.name])
                holder.attr["T"].type = held.output.dtype
                gates.setdefault(later, []).append(holder.name)  # else TensorFlow would remove it

    def _ending(self, at: int) -> str:
        """The node that is over if all up to `at` are."""
        return self.step.operations[self.step.linked(at)].node.name

    def _add(self, op: str, device: str, inputs: list[str], controls: list[str]) -> Any:
        node = self.definition.node.add()
        self.made += 1
        node.name, node.op, node.device = f"{self.name}{op}_{self.made}", op, device
        node.input.extend(inputs)
        node.input.extend(f"^{one}" for one in dict.fromkeys(controls))
        return node

    def _copy(self, op: str, inputs: list[str], controls: list[str], dtype: int) -> str:
        node = self._add(op, self.tier.device(self.step.device), inputs, controls)
        node.attr["T"].type = dtype
        node.attr["index"].i = self.made
        node.attr["plan"].i = self.plan
        return str(node.name)

    def _out(self, storage: int, after: int) -> str:
        (source, slot), output = self.step.storages[storage].source, self.step.storages[storage].output
        return self._copy(self.tier.out_op, [f"{source}:{slot}"], [self._ending(after)], output.dtype)

    def _back(self, storage: int, out: str, controls: list[str]) -> str:
        return self._copy(self.tier.back_op, [out], controls, self.step.storages[storage].output.dtype)

    def _connect(self, returns: dict[int, list[_Return]]) -> None:
        """Point every later reader of what came back at the tensor that came back, or at the same view of it."""
        step = self.step
        cloned: dict[tuple[str, str], str] = {}

        def seen_through(tensor: tuple[str, int], new: str) -> str:
            """What stands for `tensor` if `new` stands for its storage."""
            view = step.views.get(tensor[0])
            if view is None:
                return new
            if view.op == "IdentityN":
                return seen_through(view.inputs[tensor[1]], new)
            source = seen_through(view.inputs[0], new)
            if (view.name, new) not in cloned:
                node = self.definition.node.add()
                node.CopyFrom(view.definition)
                self.made += 1
                node.name = f"{self.name}view_{self.made}"
                rest = [one for one in node.input if one[0] != "^"][1:]
                del node.input[:]
                node.input.extend([source, *rest])
                node.attr.pop("_class", None)
                cloned[view.name, new] = node.name
            return cloned[view.name, new]

        for at, operation in enumerate(step.operations):
            for slot, tensor in enumerate(operation.node.inputs):
                found = returns.get(step.where.get(tensor, -1), ())
                which = bisect_right([one.reader for one in found], at) - 1
                if which >= 0:
                    operation.node.definition.input[slot] = seen_through(tensor, found[which].tensor)
