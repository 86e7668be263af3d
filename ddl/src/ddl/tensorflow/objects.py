"""Variables and Python objects, from one rank to all or from all to all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from ddl.frontends.core import calls, objects
from ddl.frontends.core.arrays import Array
from ddl.frontends.core.calls import Called
from ddl.tensorflow.collectives import copied
from ddl.tensorflow.process_sets import ProcessSet, global_process_set, sets

ObjectT = TypeVar("ObjectT")


def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> Any:
    """Assign the root's values to everyone's variables; in a graph, the operation that does. `inplace` is ignored."""
    assigned = [variable.assign(*copied([variable], root_rank, process_set)) for variable in variables]
    return None if tf.executing_eagerly() else tf.group(*assigned)


def broadcast_(
    variables: Iterable[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[tf.Tensor]:
    """Assign the root's values to everyone's variables, and return these."""
    variables = list(variables)
    values = copied(variables, root_rank, process_set, name)
    assigned = [variable.assign(value) for variable, value in zip(variables, values, strict=True)]
    return [tf.convert_to_tensor(its) for its in assigned]


def broadcast_global_variables(root_rank: int) -> Any:
    """The operation of a graph that assigns the root's values to everyone's global variables.

    Raises RuntimeError: there is no graph, and so no global variables.
    """
    if tf.executing_eagerly():
        raise RuntimeError("broadcast_global_variables: eagerly there are none: use broadcast_variables")
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


def broadcast_object(
    obj: ObjectT,
    root_rank: int = 0,
    session: object = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> ObjectT:
    """The root's object, on every rank; anything that can be pickled."""

    def copy_from_root(array: Array, part: str | None) -> None:
        number = process_set.process_set_id or 0
        (copy,) = calls.run([array], Called("broadcast", part, f"root {root_rank}", root_rank, number), sets)
        array[...] = copy

    return objects.broadcast(obj, process_set.number_of(root_rank) == process_set.rank(), name, copy_from_root)


def allgather_object(
    obj: ObjectT, session: object = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[ObjectT]:
    """Everyone's object, in the order of ranks."""
    process_set.rank()  # raises if this rank is not in it

    def gathered(array: Array, part: str | None) -> Array:
        (every,) = calls.run([array], Called("allgather", part, "", 0, process_set.process_set_id or 0), sets)
        return every

    return objects.allgather(obj, name, gathered)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Broadcasts all global variables when a MonitoredSession begins."""

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self._root = root_rank
        self._operation: Any = None

    def begin(self) -> None:
        """Add the operation to the graph."""
        self._operation = broadcast_global_variables(self._root)

    def after_create_session(self, session: Any, coord: object) -> None:
        """Run it."""
        session.run(self._operation)


def _number(question: Any, name: str | None) -> tf.Tensor:
    answer = tf.numpy_function(lambda: np.int32(question()), [], tf.int32, name=name)
    answer.set_shape([])
    return answer


def rank_op(name: str | None = None) -> tf.Tensor:
    """`rank` at the time when the graph runs."""
    return _number(sets.rank, name)


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """`local_rank` at the time when the graph runs."""
    return _number(sets.local_rank, name)


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """`size` of a process set at the time when the graph runs."""
    return _number(lambda: sets.numbered(process_set_id).size(), name)


def local_size_op(name: str | None = None) -> tf.Tensor:
    """`local_size` at the time when the graph runs."""
    return _number(sets.local_size, name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """1 if this rank is in the process set at the time when the graph runs, else 0."""
    return _number(lambda: sets.numbered(process_set_id).included(), name)
