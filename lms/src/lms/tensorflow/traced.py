"""What is known of a step once it is traced: the place of each operation, and the sizes of what they make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_def_registry
from tensorflow.python.ops.handle_data_util import get_resource_handle_data

from lms.tensorflow.graph import SHAPES

CALLS = {"PartitionedCall", "StatefulPartitionedCall"}  # TensorFlow puts what they call in their place before it runs
_UNTOUCHED = {"While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase"}
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

    numbers: dict[str, int]  # name of an operation, as it is once calls are replaced -> its place in the order
    outputs: dict[str, tuple[Output, ...]]
    variables: int  # bytes of all variables: parameters, the optimizer's, statistics
    inputs: int  # bytes of the batch
    untouched: dict[str, int]  # kinds of operations whose inside is not looked into, and how many
    unknown: int  # tensors whose size is not known before they are made
    random: bool  # whether each trace begins a sequence of random numbers again
    calls: dict[str, str] = field(default_factory=dict)  # name of an operation that calls a function -> the function's
    devices: dict[str, int] = field(default_factory=dict)  # device that the script has named -> bytes that it makes


def read_traced(graph: Any, start: int, given: Sequence[Any] | None = None) -> Known:
    """The step that the graph's operations from number `start` on are.

    `given` are the shapes of the graph's inputs in the first batch: tracing may not know how many samples it has. They
    do not count if they do not fit the inputs.
    """
    operations = graph.get_operations()[start:]
    captured = {id(inner) for _, inner in graph.captures}
    inputs = [tensor for tensor in graph.inputs if id(tensor) not in captured]
    first = list(zip(inputs, given, strict=True)) if given is not None and len(given) == len(inputs) else []
    if not all(tensor.shape.is_compatible_with(one) for tensor, one in first):
        first = []
    shapes: dict[str, Any] = {}
    # A function's result has no shape in the graph that calls it, even if that of each input is known.
    if (first or any(op.type in CALLS for op in operations)) and not _is_known(operations):
        shapes = resolved_shapes(graph, {tensor.op.name: one for tensor, one in first})
    numbers: dict[str, int] = {}
    outputs: dict[str, tuple[Output, ...]] = {}
    calls: dict[str, str] = {}
    devices: dict[str, int] = {}
    untouched: dict[str, int] = {}
    unknown = 0
    for name, op, its_shapes in _walk(graph, operations, shapes):
        numbers[name] = len(numbers)
        outputs[name] = tuple(_output(tensor, its_shapes) for tensor in op.outputs)
        if op.device and op.type != "Placeholder":
            made = sum(one.nbytes or 0 for one in outputs[name] if one.floating)
            devices[op.device] = devices.get(op.device, 0) + made
        if op.type in CALLS:
            calls[name] = op.get_attr("f").name
        elif op.type not in SHAPES:
            unknown += sum(one.nbytes is None for one in outputs[name])
        if op.type in _UNTOUCHED or op.type.startswith("TensorList"):
            kind = "TensorList" if op.type.startswith("TensorList") else op.type
            untouched[kind] = untouched.get(kind, 0) + 1
    batch = sum(_output(tensor, shapes).nbytes or 0 for tensor in inputs)
    random = _draws(graph, operations)
    return Known(numbers, outputs, _variables(graph), batch, untouched, unknown, random, calls, devices)


def _walk(
    graph: Any, operations: Sequence[Any], shapes: Mapping[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Each operation, right after it those of the function that it calls, and the shapes that are known beside.

    TensorFlow puts the operations of a function in place of the call, under the name of the call.
    """
    for op in operations:
        name = prefix + op.name
        yield name, op, shapes
        function = graph._get_function(op.get_attr("f").name) if op.type in CALLS else None
        inner = getattr(function, "graph", None)
        if inner is None or len(inner.inputs) != len(op.inputs):  # else it has captured more since
            continue
        found: Mapping[str, Any] = {}
        if not _is_known(inner.get_operations()):
            pairs = zip(inner.inputs, op.inputs, strict=True)
            found = resolved_shapes(inner, {to.op.name: _shape(given, shapes) for to, given in pairs})
        yield from _walk(inner, inner.get_operations(), found, f"{name}/")


def _is_known(operations: Sequence[Any]) -> bool:
    return all(tensor.shape.is_fully_defined() for op in operations for tensor in op.outputs if _plain(tensor))


def _draws(graph: Any, operations: Sequence[Any]) -> bool:
    """Whether an operation, or one in a function that is called, has a seed and keeps its place in the sequence."""
    if any(_has_a_place(op.type) and _is_seeded(op.node_def) for op in operations):
        return True
    if not any(op.type in CALLS | _UNTOUCHED for op in operations):
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


def _output(tensor: Any, shapes: Mapping[str, Any]) -> Output:
    dtype = tensor.dtype
    if not _plain(tensor):
        return Output(0, dtype.as_datatype_enum, floating=False)
    shape = _shape(tensor, shapes)
    nbytes = dtype.size * shape.num_elements() if shape.is_fully_defined() else None
    return Output(nbytes, dtype.as_datatype_enum, dtype.is_floating)


def _shape(tensor: Any, shapes: Mapping[str, Any]) -> Any:
    return tensor.shape if tensor.shape.is_fully_defined() else shapes.get(tensor.name, tensor.shape)


def _plain(tensor: Any) -> bool:
    return tensor.dtype not in _NOT_PLAIN


def resolved_shapes(graph: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Shapes of all tensors by name, if the graph's own inputs had the shapes `given`, by the names of inputs."""
    definition = graph.as_graph_def()
    handles = [inner for _, inner in graph.captures] + list(graph.inputs)
    variables = {inner.op.name: _content(inner) for inner in handles if inner.dtype == tf.resource}
    for node in definition.node:
        if node.op != "Placeholder":
            continue
        if (content := variables.get(node.name)) is None:
            if node.name in given:
                node.attr["shape"].shape.CopyFrom(given[node.name].as_proto())
                node.attr.pop("_output_shapes", None)
        else:
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
