"""Places at which a graph may be edited and TensorFlow's optimizers still rewrite all that they rewrite without.

Grappler replaces groups of operations by others that round differently: sums in another order, products with fewer
broadcasts, a convolution with its bias, a chain of unary functions. A group is held together by tensors that one
operation alone reads, and Grappler leaves a group alone as soon as one of its operations has a control edge. So LMS has
no control edges inside the step, and touches only tensors that several operations read (arithmetic_optimizer.cc and
remapper.cc of TensorFlow 2.16 to 2.21).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

SHAPES = {"Shape", "ShapeN", "Size", "Rank"}  # they need no bytes, and Grappler replaces them by constants
_COMMUTATIVE = {"Add", "AddV2", "Mul", "AddN", "Maximum", "Minimum"}
_PRODUCTS = {"MatMul", "BatchMatMulV2", "BatchMatMulV3", "Conv2D", "Conv3D", "DepthwiseConv2dNative"}
# A product is in no group if only these read it.
_AFTER_PRODUCTS = {"Mul", "Square", "Sub", "L2Loss", "Cast", "AssignSubVariableOp", "AssignAddVariableOp"}
_ALONE = {"MaxPool", "MaxPool3D", "AvgPool", "AvgPool3D", "GatherV2", "ResourceGather", "RandomUniform"}
# Groups whose inner tensor may have other readers: (operation, reader).
_SHARED_GROUPS = {
    ("Transpose", "MatMul"),
    ("Transpose", "BatchMatMulV2"),
    ("Transpose", "BatchMatMulV3"),
    ("Transpose", "Transpose"),
    ("Add", "Log"),
    ("AddV2", "Log"),
    ("Exp", "Sub"),
    ("Neg", "Sub"),
    ("Neg", "Add"),
    ("Neg", "AddV2"),
}
_FACTORS = {"Mul", "RealDiv", "Div", "DivNoNan", "MulNoNan"}
_SUMS = {"Add", "AddV2", "AddN"}


class Patterns:
    """What Grappler may do with the operations of a graph that run, given in the order of their creation."""

    def __init__(self, live: Iterable[Any]) -> None:
        self._readers: dict[int, list[Any]] = {}  # id of a tensor -> live operations that need its bytes
        self._twins: set[Any] = set()  # operations that compute the same as another: Grappler keeps one of them
        number: dict[int, object] = {}  # id of a tensor -> what stands for its value
        found: dict[object, list[Any]] = {}
        for op in live:
            same = self._earlier(op, number, found)
            for slot, tensor in enumerate(op.outputs):
                number[id(tensor)] = (same or op, slot)
            if op.type not in SHAPES:
                for tensor in {id(one): one for one in op.inputs}.values():
                    self._readers.setdefault(id(tensor), []).append(op)

    def _earlier(self, op: Any, number: dict[int, object], found: dict[object, list[Any]]) -> Any:
        """An operation before this one that computes the same, or None."""
        if op.op_def.is_stateful or not op.outputs:
            return None
        inputs = [number.get(id(tensor), id(tensor)) for tensor in op.inputs]
        key: tuple[object, ...] = (op.type, op.device, frozenset(inputs) if op.type in _COMMUTATIVE else tuple(inputs))
        if op.type == "Const":
            shape = op.outputs[0].shape
            if not shape.is_fully_defined() or shape.num_elements() > 64:
                return None
            key = (*key, op.get_attr("value").SerializeToString())
        others = found.setdefault(key, [])
        for other in others:
            if op.type == "Const" or _attributes(op) == _attributes(other):
                if op.type != "Const":
                    self._twins |= {op, other}
                return other
        others.append(op)
        return None

    def readers(self, tensor: Any) -> list[Any]:
        """The operations that read it, in the order of their creation."""
        return self._readers.get(id(tensor), [])

    def is_open(self, tensor: Any) -> bool:
        """Whether the tensor may get one more reader, and its readers another operation to read it from."""
        return len(self.readers(tensor)) > 1 and not self._is_bound(tensor)

    def _is_bound(self, tensor: Any) -> bool:
        readers = self.readers(tensor)
        if tensor.op in self._twins or any(op in self._twins for op in readers):
            return True
        return any((tensor.op.type, op.type) in _SHARED_GROUPS for op in readers)

    def is_part(self, op: Any) -> bool:
        """Whether oneDNN makes the operation a part of another, so that waiting for it would be a cycle."""
        filters = ("Conv2DBackpropFilter", "Conv3DBackpropFilterV2")
        return op.type == "BiasAddGrad" and any(one.type in filters for one in self.readers(op.inputs[0]))

    def may_split(self, tensor: Any) -> bool:
        """Whether some of its readers may read a copy of the tensor: not if it is a factor that a sum is freed of."""
        if self._is_bound(tensor):
            return False
        sums = [
            reader
            for op in self.readers(tensor)
            if op.type in _FACTORS
            for one in op.outputs
            for reader in self.readers(one)
            if reader.type in _SUMS
        ]
        return len(sums) == len(set(sums))

    def tap(self, op: Any) -> Any | None:
        """A tensor of the operation that may get one more reader; None: none may."""
        for tensor in op.outputs:
            if tensor.dtype.name != "resource" and (self.is_open(tensor) or (self.readers(tensor) and self._alone(op))):
                return tensor
        return None

    def _alone(self, op: Any) -> bool:
        """Whether the operation is in no group, whoever reads it."""
        if op in self._twins:
            return False
        if "Backprop" in op.type or op.type.endswith(("Grad", "GradV3")) or op.type in _ALONE:
            return True
        if op.type in _PRODUCTS:
            known = _AFTER_PRODUCTS - ({"Mul"} if op.type.startswith("Batch") else set())
            return all(reader.type in known for tensor in op.outputs for reader in self.readers(tensor))
        return False


def _attributes(op: Any) -> dict[str, bytes]:
    return {name: value.SerializeToString() for name, value in op.node_def.attr.items() if name[0] != "_"}
