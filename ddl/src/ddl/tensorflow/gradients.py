"""Reduces a model's gradients in buckets. All of them start before the first is waited for."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from ddl.frontends.core.buckets import even_groups, limit_of, plan
from ddl.frontends.core.calls import Called
from ddl.frontends.core.ops import Average, Op, Reduction, check_optimizer
from ddl.tensorflow import collectives, operations
from ddl.tensorflow.collectives import key_of, scale
from ddl.tensorflow.compression import Compression, Compressor
from ddl.tensorflow.process_sets import ProcessSet, global_process_set

Gradient = Any  # tf.Tensor, tf.IndexedSlices or None


@dataclass(frozen=True)
class Method:
    """How gradients are reduced.

    With `predivide` f an average is f / size times the sum of gradients over f. `groups`: into how many buckets they
    are divided, or lists of variables that have one each; 0: by HOROVOD_FUSION_THRESHOLD bytes (default 25 MiB).
    `owner`: whose gradients they are, in the same words on all ranks; None: that of the variables, by their first use.

    Raises ValueError for arguments that do not fit together, and what `ops.check` raises.
    """

    op: Op = Average
    predivide: float = 1.0
    compression: type[Compressor] = Compression.none
    sparse_as_dense: bool = False
    groups: int | Sequence[Sequence[Any]] = 0
    process_set: ProcessSet = global_process_set
    owner: str | None = None

    def __post_init__(self) -> None:
        check_optimizer(self.op, self.predivide, self.groups)

    @collectives.unconverted
    def reduce(self, gradients: Sequence[Gradient], variables: Sequence[Any]) -> list[Gradient]:
        """The reduced gradients of these variables. None stays None; so does all on a rank outside of the set."""
        reduced = list(gradients)
        if not self.process_set.included():
            return reduced
        there = [number for number, its in enumerate(reduced) if its is not None]
        if self.sparse_as_dense:
            for number in there:
                reduced[number] = tf.convert_to_tensor(reduced[number])
        sparse = [number for number in there if isinstance(reduced[number], tf.IndexedSlices)]
        dense = [number for number in there if number not in sparse]
        owner = self.owner or _owner_of(variables, self.process_set)
        buckets = self._buckets([reduced[number] for number in dense], [variables[number] for number in dense])
        ends = [
            _start(
                [reduced[dense[its]] for its in bucket],
                [dense[its] for its in bucket],
                self,
                _name_of(owner, "bucket", number),
            )
            for number, bucket in enumerate(buckets, 1)
        ]
        for end in ends:
            for number, gradient in end():
                reduced[number] = gradient
        for number in sparse:
            name = _name_of(owner, "slices", number)
            reduced[number] = collectives.gathered_slices(reduced[number], self.how, name)
        return reduced

    @property
    def how(self) -> Reduction[ProcessSet]:
        """The reduction of a bucket."""
        return Reduction(self.op, 1 / self.predivide, self.predivide, self.process_set)

    def _buckets(self, gradients: Sequence[tf.Tensor], variables: Sequence[Any]) -> list[list[int]]:
        nbytes = [(its.shape.num_elements() or 0) * its.dtype.size for its in gradients]
        if isinstance(self.groups, int):
            groups = even_groups(len(gradients), self.groups)
        else:
            number_of = {id(variable): number for number, variable in enumerate(variables)}
            groups = [[number_of[id(its)] for its in group if id(its) in number_of] for group in self.groups]
        return plan(nbytes, [its.dtype for its in gradients], limit_of(os.environ), groups)


def _owner_of(variables: Sequence[Any], process_set: ProcessSet) -> str | None:
    """Whose gradients these are: of variables that are used together, by the first of them; None if all are tensors."""
    first = next((its for its in variables if isinstance(its, tf.Variable | keras.Variable)), None)
    if first is None:
        return None
    if not hasattr(first, "_ddl_numbers"):
        first._ddl_numbers = {}
    numbers: dict[int | None, int] = first._ddl_numbers
    if process_set.process_set_id not in numbers:
        numbers[process_set.process_set_id] = process_set.count_optimizer()
    return f"variables {numbers[process_set.process_set_id]}"


def _name_of(owner: str | None, what: str, number: int) -> str | None:
    """The name of a call. In a graph it has the call's number there, as an owner may step more than once in it."""
    whole = "gradients" if owner is None else f"gradients of {owner}"
    if tf.executing_eagerly():
        return None if owner is None else f"{whole}, {what} {number}"
    return key_of(None, f"{whole}, {what}")


def _start(
    gradients: Sequence[tf.Tensor], numbers: Sequence[int], method: Method, name: str | None
) -> Callable[[], list[tuple[int, tf.Tensor]]]:
    """Start to reduce a bucket; returns what waits for it and gives each gradient by its number."""
    how = method.how
    alone = len(gradients) == 1
    whole = gradients[0] if alone else tf.concat([tf.reshape(its, [-1]) for its in gradients], 0)
    small, context = method.compression.compress(scale(whole, how.prescale, "gradient_predivide_factor"))
    number = method.process_set.process_set_id
    assert number is not None
    what = Called("allreduce", name, how.terms(), 0, number)
    call = operations.start([small], what, 1)

    def end() -> list[tuple[int, tf.Tensor]]:
        (result,) = operations.finish(call, [small.dtype], [small.shape])
        result = scale(method.compression.decompress(result, context), how.postscale, "gradient_predivide_factor")
        if alone:
            return [(numbers[0], result)]
        parts = tf.split(result, [its.shape.num_elements() or tf.size(its) for its in gradients])
        return [
            (place, tf.reshape(part, tf.shape(its) if its.shape.num_elements() is None else its.shape))
            for place, part, its in zip(numbers, parts, gradients, strict=True)
        ]

    return end
