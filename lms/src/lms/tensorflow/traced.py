"""What is known of a step once it is traced: the place of each operation, and the sizes of what they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_def_registry
from tensorflow.python.ops.handle_data_util import get_resource_handle_data

from lms.tensorflow.graph import SHAPES

_INNER = {"While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase", "PartitionedCall"}
_INNER |= {"StatefulPartitionedCall"}
_NOT_PLAIN = (tf.resource, tf.variant, tf.string)


@dataclass(frozen=True)
class Output:
    """One tensor that an operation makes."""

    nbytes: int | None  # None: not known before it is made
    dtype: int  # as TensorFlow numbers them
    floating: bool


@dataclass(frozen=True)
class Known:
    """A traced step."""

    numbers: dict[str, int]  # name of an operation -> its place in the order in which they were made
    outputs: dict[str, tuple[Output, ...]]
    variables: int  # bytes of all variables: parameters, the optimizer's, statistics
    inputs: int  # bytes of the batch
    untouched: dict[str, int]  # kinds of operations whose inside is not looked into, and how many
    unknown: int  # tensors whose size is not known before they are made
    random: bool  # whether each trace begins a sequence of random numbers again


def read_traced(graph: Any, start: int, given: Sequence[Any] | None = None) -> Known:
    """The step that the graph's operations from number `start` on are.

    `given` are the shapes of the graph's inputs in the first batch: tracing may not know how many samples it has.
    """
    operations = graph.get_operations()[start:]
    shapes: dict[str, Any] = {}
    if given is not None and any(
        not tensor.shape.is_fully_defined() for op in operations for tensor in op.outputs if _plain(tensor)
    ):
        shapes = resolved_shapes(graph, given)
    numbers: dict[str, int] = {}
    outputs: dict[str, tuple[Output, ...]] = {}
    untouched: dict[str, int] = {}
    unknown = 0
    for number, op in enumerate(operations):
        numbers[op.name] = number
        outputs[op.name] = tuple(_output(tensor, shapes) for tensor in op.outputs)
        if op.type not in SHAPES:
            unknown += sum(one.nbytes is None for one in outputs[op.name])
        if op.type in _INNER or op.type.startswith("TensorList"):
            kind = "TensorList" if op.type.startswith("TensorList") else op.type
            untouched[kind] = untouched.get(kind, 0) + 1
    captured = {id(inner) for _, inner in graph.captures}
    inputs = [_output(tensor, shapes).nbytes or 0 for tensor in graph.inputs if id(tensor) not in captured]
    return Known(numbers, outputs, _variables(graph), sum(inputs), untouched, unknown, _draws(graph, operations))


def _draws(graph: Any, operations: Sequence[Any]) -> bool:
    """Whether an operation, or one in a function that is called, has a seed and keeps its place in the sequence."""
    if any(_has_a_place(op.type) and _is_seeded(op.node_def) for op in operations):
        return True
    if not any(op.type in _INNER for op in operations):
        return False
    inner = (node for function in graph.as_graph_def().library.function for node in function.node_def)
    return any(_has_a_place(node.op) and _is_seeded(node) for node in inner)


def _has_a_place(kind: str) -> bool:
    operation = _operation(kind)
    return operation is not None and operation.is_stateful and any(one.name == "seed" for one in operation.attr)


def _is_seeded(definition: Any) -> bool:
    # Without any seed plain training, too, has other numbers each time.
    return any(definition.attr[name].i for name in ("seed", "seed2"))


def as_built(definition: Any, outputs: Sequence[Output]) -> tuple[Output, ...]:
    """The outputs of a NodeDef with the types that it makes: an optimizer may have given it other types."""
    types = [*_output_types(definition), *[None] * len(outputs)]
    return tuple(_retyped(output, number) for output, number in zip(outputs, types, strict=False))


def _output_types(definition: Any) -> list[int | None]:
    """The types of a NodeDef's outputs, as TensorFlow numbers them, up to the first that the node does not tell."""
    types: list[int | None] = []
    operation = _operation(definition.op)
    for one in operation.output_arg if operation is not None else ():
        if not {name for name in (one.type_attr, one.number_attr, one.type_list_attr) if name} <= set(definition.attr):
            break
        if one.type_list_attr:
            types += definition.attr[one.type_list_attr].list.type
            continue
        dtype = definition.attr[one.type_attr].type if one.type_attr else one.type
        types += [dtype] * (definition.attr[one.number_attr].i if one.number_attr else 1)
    return types


@cache
def _operation(name: str) -> Any | None:
    return op_def_registry.get(name)


def _retyped(output: Output, number: int | None) -> Output:
    if number is None or number == output.dtype:
        return output
    dtype = tf.as_dtype(number)
    if dtype in _NOT_PLAIN:
        return Output(0, number, floating=False)
    nbytes = output.nbytes and output.nbytes // tf.as_dtype(output.dtype).size * dtype.size
    return Output(nbytes, number, dtype.is_floating)


def _output(tensor: Any, shapes: dict[str, Any]) -> Output:
    dtype = tensor.dtype
    if not _plain(tensor):
        return Output(0, dtype.as_datatype_enum, floating=False)
    shape = tensor.shape if tensor.shape.is_fully_defined() else shapes.get(tensor.name, tensor.shape)
    nbytes = dtype.size * shape.num_elements() if shape.is_fully_defined() else None
    return Output(nbytes, dtype.as_datatype_enum, dtype.is_floating)


def _plain(tensor: Any) -> bool:
    return tensor.dtype not in _NOT_PLAIN


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


def _variables(graph: Any) -> int:
    contents = [_content(inner) for _, inner in graph.captures if inner.dtype == tf.resource]
    return sum(
        tf.as_dtype(one.dtype).size * (tf.TensorShape(one.shape).num_elements() or 0)
        for one in contents
        if one is not None
    )


def _content(handle: Any) -> Any | None:
    """Type and shape of the variable that a tensor is the handle of; None: it is of something else."""
    found = get_resource_handle_data(handle)
    return found.shape_and_type[0] if found is not None and len(found.shape_and_type) == 1 else None
