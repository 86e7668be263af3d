"""Collectives of tensors, by Horovod's names and arguments. They work eagerly, in a tf.function, and in a graph.

Every rank of `process_set` makes the same calls. Those with a `name` are matched by it, in whatever order they are
made. Without one, calls of a tf.function are matched by its name and their numbers in it, and eager calls by their
order: calls that may run at the same time, of two functions of one name or from two threads, need names of their own.
An error is one of TensorFlow's: FailedPreconditionError if the ranks' types, shapes, reductions or roots differ,
DeadlineExceededError if a rank does not make the call within DDL_TIMEOUT seconds, UnavailableError if one has died or
left. The messages name the ranks. `device_dense` and `device_sparse` are ignored, and `ignore_name_scope` too: no name
has a scope.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import tensorflow as tf

from ddl.errors import UnsupportedError
from ddl.frontends.core.calls import Called
from ddl.frontends.core.ops import Op, Reduction, chosen, need_linear
from ddl.tensorflow import operations
from ddl.tensorflow.compression import Compression, Compressor
from ddl.tensorflow.process_sets import ProcessSet, global_process_set, sets

Tensor = Any  # tf.Tensor, tf.Variable or what TensorFlow makes a tensor of
How = Reduction[ProcessSet]
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def unconverted(function: FunctionT) -> FunctionT:
    """A function whose `if`s and loops are Python's, also in a tf.function."""
    return cast(FunctionT, tf.autograph.experimental.do_not_convert(function))


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> tf.Tensor | tf.IndexedSlices:
    """`tensor` reduced over all ranks, by default averaged; the same bits on every rank. IndexedSlices are gathered."""
    how = Reduction(chosen(average, op), prescale_factor, postscale_factor, process_set)
    if isinstance(tensor, tf.IndexedSlices):
        return gathered_slices(tensor, how, name)
    small, context = compression.compress(tf.convert_to_tensor(tensor))
    return compression.decompress(reduced([small], how, name)[0], context)


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[tf.Tensor | tf.IndexedSlices]:
    """`allreduce` of each tensor, in one call."""
    how = Reduction(chosen(average, op), prescale_factor, postscale_factor, process_set)
    sparse = [
        gathered_slices(its, how, _part(name, number)) if isinstance(its, tf.IndexedSlices) else None
        for number, its in enumerate(tensors)
    ]
    dense = [tf.convert_to_tensor(its) for its, slices in zip(tensors, sparse, strict=True) if slices is None]
    pairs = [compression.compress(its) for its in dense]
    results = iter(reduced([small for small, _ in pairs], how, name) if pairs else [])
    whole = (compression.decompress(next(results), context) for _, context in pairs)
    return [slices if slices is not None else next(whole) for slices in sparse]


@unconverted
def gathered_slices(slices: tf.IndexedSlices, how: How, name: str | None = None) -> tf.IndexedSlices:
    """Everyone's slices: an index may come more than once, and counts as the sum of its values."""
    if how.op not in (Op.Sum, Op.Average):
        raise UnsupportedError(f"op={how.op.name} of IndexedSlices: only Sum and Average leave out what is not there")
    if how.prescale != 1 or how.postscale != 1:
        raise UnsupportedError("prescale_factor and postscale_factor of IndexedSlices: scale their values yourself")
    values, indices = gathered([slices.values, slices.indices], how.process_set, name)
    if how.op is Op.Average:
        values = values / tf.cast(how.process_set.size(), values.dtype)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def reducescatter(
    tensor: Tensor,
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: Op = Op.Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """This rank's rows of the reduced `tensor`. If they do not divide evenly, the first ranks get one more."""
    arguments = (compression, op, process_set, ignore_name_scope, name, prescale_factor, postscale_factor)
    return grouped_reducescatter([tensor], device_dense, *arguments)[0]


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: Op = Op.Average,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[tf.Tensor]:
    """`reducescatter` of each tensor, in one call."""
    how = Reduction(op, prescale_factor, postscale_factor, process_set)
    pairs = [compression.compress(tf.convert_to_tensor(its)) for its in tensors]
    results = scattered([small for small, _ in pairs], how, name)
    return [compression.decompress(its, context) for its, (_, context) in zip(results, pairs, strict=True)]


def allgather(
    tensor: Tensor,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Everyone's rows, in the order of ranks. Ranks may have different numbers of rows."""
    return gathered([tensor], process_set, name)[0]


def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """`allgather` of each tensor, in one call."""
    return gathered(tensors, process_set, name)


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """The root's `tensor`, on every rank. `root_rank` counts all ranks, not those of the set."""
    return copied([tensor], root_rank, process_set, name)[0]


def alltoall(
    tensor: Tensor,
    splits: Tensor | None = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor | tuple[tf.Tensor, tf.Tensor]:
    """Rows of `tensor` to each rank: `splits[r]` to rank r, or to each as many. Returns everyone's for this rank.

    With `splits` also how many rows each rank has sent.
    """
    received, rows = exchanged(tf.convert_to_tensor(tensor), splits, process_set, name)
    return received if splits is None else (received, rows)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank has called it."""
    process_set.meet("barrier")


def join() -> int:
    """Say that this rank has run out of data, and wait until every rank has; returns the one that was the last to.

    Until then it takes part in the others' allreduces, and in steps of their optimizers, with zeros (in a minimum,
    maximum or product with what leaves that as it is); an average is still over all ranks. A rank that calls anything
    else before all have joined gets an error.
    """
    return sets.join()


# ---- Calls through which gradients flow. Their scale is Horovod's, not always that of the sum of all ranks' losses. --


@unconverted
def reduced(tensors: Sequence[tf.Tensor], how: How, name: str | None = None) -> list[tf.Tensor]:
    """The tensors, reduced; the gradient is the same reduction of everyone's gradients."""

    def backward(*gradients: tf.Tensor) -> list[tf.Tensor]:
        need_linear(how.op)
        return reduced(gradients, how)

    def forward(*inputs: tf.Tensor) -> list[tf.Tensor]:
        scaled = [scale(its, how.prescale, "prescale_factor") for its in inputs]
        what = _called("allreduce", name, how.process_set, how.terms())
        outputs = call(scaled, what, [its.shape for its in scaled])
        return [scale(its, how.postscale, "postscale_factor") for its in outputs]

    return _with_gradient(forward, backward, tensors)


@unconverted
def scattered(tensors: Sequence[tf.Tensor], how: How, name: str | None = None) -> list[tf.Tensor]:
    """This rank's rows of the reduced tensors; the gradient is everyone's, gathered; of a sum, times size."""

    def backward(*gradients: tf.Tensor) -> list[tf.Tensor]:
        need_linear(how.op)
        factor = how.prescale * how.postscale * (how.process_set.size() if how.op is Op.Sum else 1)
        return [scale(its, factor, "the factor") for its in gathered(gradients, how.process_set)]

    def forward(*inputs: tf.Tensor) -> list[tf.Tensor]:
        scaled = [scale(its, how.prescale, "prescale_factor") for its in inputs]
        what = _called("reducescatter", name, how.process_set, how.terms())
        outputs = call(scaled, what, [_any_rows(its) for its in scaled])
        return [scale(its, how.postscale, "postscale_factor") for its in outputs]

    return _with_gradient(forward, backward, tensors)


@unconverted
def gathered(tensors: Sequence[Tensor], process_set: ProcessSet, name: str | None = None) -> list[tf.Tensor]:
    """Everyone's rows; the gradient is this rank's rows of the average of everyone's gradients."""
    counts: list[tf.Tensor] = []

    def backward(*gradients: tf.Tensor) -> list[tf.Tensor]:
        every = call(counts, _called("allgather", None, process_set), [tf.TensorShape([None])] * len(counts))
        averages = reduced(gradients, Reduction(Op.Average, 1.0, 1.0, process_set))
        mine = process_set.rank()
        return [
            its[tf.reduce_sum(rows[:mine]) : tf.reduce_sum(rows[: mine + 1])]
            for its, rows in zip(averages, every, strict=True)
        ]

    def forward(*inputs: tf.Tensor) -> list[tf.Tensor]:
        counts[:] = [tf.shape(its)[:1] for its in inputs]
        return call(inputs, _called("allgather", name, process_set), [_any_rows(its) for its in inputs])

    return _with_gradient(forward, backward, [tf.convert_to_tensor(its) for its in tensors])


@unconverted
def copied(
    tensors: Sequence[Tensor], root_rank: int, process_set: ProcessSet, name: str | None = None
) -> list[tf.Tensor]:
    """The root's tensors; their gradients are the averages of everyone's gradients, and the others' are 0."""

    def backward(*gradients: tf.Tensor) -> list[tf.Tensor]:
        averages = reduced(gradients, Reduction(Op.Average, 1.0, 1.0, process_set))
        if process_set.number_of(root_rank) == process_set.rank():
            return averages
        with tf.control_dependencies(averages):  # the root waits for them, though nobody here needs them
            return [tf.identity(tf.zeros_like(its)) for its in averages]

    def forward(*inputs: tf.Tensor) -> list[tf.Tensor]:
        what = _called("broadcast", name, process_set, f"root {root_rank}", root_rank)
        return call(inputs, what, [its.shape for its in inputs])

    return _with_gradient(forward, backward, [tf.convert_to_tensor(its) for its in tensors])


@unconverted
def exchanged(
    tensor: tf.Tensor, splits: Tensor | None, process_set: ProcessSet, name: str | None = None
) -> tuple[tf.Tensor, tf.Tensor]:
    """Everyone's rows for this rank, and how many each sent; the gradient goes back the way that the rows came."""
    sent = tf.constant([], tf.int32) if splits is None else tf.cast(splits, tf.int32)
    received: list[tf.Tensor] = []

    def backward(gradient: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
        return exchanged(gradient, received[0], process_set)[0]

    def forward(rows: tf.Tensor) -> list[tf.Tensor]:
        shapes = [_any_rows(rows), tf.TensorShape([None])]
        outputs = call([rows, sent], _called("alltoall", name, process_set), shapes, [rows.dtype, tf.int32])
        received[:] = [outputs[1]]
        return outputs

    both = _with_gradient(forward, backward, [tensor])
    return both[0], both[1]


# ---- Their parts ---------------------------------------------------------------------------------------------------


def call(
    tensors: Sequence[tf.Tensor],
    what: Called,
    shapes: Sequence[tf.TensorShape],
    types: Sequence[tf.DType] | None = None,
) -> list[tf.Tensor]:
    """Make a call; its results have `shapes`, and the inputs' types if not others are given.

    Raises UnsupportedError for strings.
    """
    if any(its.dtype == tf.string for its in tensors):
        raise UnsupportedError(
            f"{what.kind} of a tensor of strings: tensors of numbers alone can be sent; broadcast_object and "
            "allgather_object send its `numpy()`"
        )
    types = [its.dtype for its in tensors] if types is None else types
    return operations.finish(operations.start(tensors, what, len(types)), types, shapes)


def key_of(name: str | None, what: str) -> str | None:
    """The name that matches a call: `name`, or in a graph the call's number and the graph's name; None if eager."""
    if name is not None or tf.executing_eagerly():
        return name
    graph = tf.compat.v1.get_default_graph()
    if not hasattr(graph, "_ddl_calls"):
        graph._ddl_calls = Counter()
    graph._ddl_calls[what] += 1
    return f"{what} {graph._ddl_calls[what]} of {_name_of(graph)}"


def _name_of(graph: Any) -> str:
    """The graph's name without the numbers that TensorFlow counts in each process: its function's, and in it a loop's.

    The branches of an `if` have one name: ranks may go different ways and make the same calls.
    """
    name = getattr(graph, "name", None)
    if name is None:
        return "the graph"
    if (backward := re.fullmatch(r"__backward_(.*)_\d+", name)) is not None:
        return f"the gradient of {backward[1]}"
    if type(graph).__name__ == "FuncGraph":
        return str(name)
    part = re.sub(r"(_true|_false|_branch\d+)?_\d+(?=_grad_|$)", "", name)
    return f"{_name_of(graph.outer_graph)}, {part}"


def scale(tensor: tf.Tensor, factor: float, what: str) -> tf.Tensor:
    """Multiply, whole numbers in double precision and rounded towards zero. Raises ValueError for bool."""
    if factor == 1:
        return tensor
    if tensor.dtype == tf.bool:
        raise ValueError(f"{what} is {factor}, but a tensor of {tensor.dtype.name} cannot be scaled: convert it first")
    precise = tf.float32 if tensor.dtype in (tf.float16, tf.bfloat16) else tf.float64
    wide = tensor if tensor.dtype in (tf.float32, tf.float64) else tf.cast(tensor, precise)
    return tf.cast(wide * tf.constant(factor, wide.dtype), tensor.dtype)


def _called(kind: str, name: str | None, process_set: ProcessSet, terms: str = "", root: int = 0) -> Called:
    assert process_set.group is not None  # raises
    number = process_set.process_set_id
    assert number is not None
    return Called(kind, key_of(name, kind), terms, root, number)


def _any_rows(tensor: tf.Tensor) -> tf.TensorShape:
    shape = tensor.shape
    return shape if not shape.rank else tf.TensorShape([None]).concatenate(shape[1:])


def _part(name: str | None, number: int) -> str | None:
    return None if name is None else f"{name} (tensor {number} of a group)"


def _with_gradient(
    forward: Callable[..., list[tf.Tensor]], backward: Callable[..., Any], tensors: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def both(*inputs: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
        return forward(*inputs), backward

    return list(both(*tensors))
