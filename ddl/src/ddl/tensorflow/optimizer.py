"""Keras optimizers, and TensorFlow 1's, that reduce gradients over all ranks before they apply them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import keras
import tensorflow as tf

from ddl.errors import MismatchError, UnsupportedError
from ddl.frontends.core.ops import Average, Op, checked_passes
from ddl.tensorflow.collectives import unconverted
from ddl.tensorflow.compression import Compression, Compressor
from ddl.tensorflow.gradients import Gradient, Method
from ddl.tensorflow.objects import allgather_object
from ddl.tensorflow.process_sets import ProcessSet, global_process_set
from ddl.tensorflow.tape import Local, variables_of


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    *,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: Op = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """`optimizer` as one of its own class and state that reduces gradients over all ranks before it applies them.

    Gradients travel in buckets of up to HOROVOD_FUSION_THRESHOLD bytes (default 25 MiB), or in `groups`: as many, or
    lists of variables. Those of `backward_passes_per_step` passes add up before, or are averaged with
    `average_aggregated_gradients`. With `gradient_predivide_factor` f an average is f / size times the sum of gradients
    over f. IndexedSlices are gathered, or reduced as dense tensors with `sparse_as_dense`. Every rank passes the same
    arguments; one that is not in `process_set` steps by its own gradients. A model that is saved with this optimizer is
    loaded with the plain one. Under the dtype policy mixed_float16 the result also scales the loss, as `compile` would:
    whether gradients are finite is then the same on all ranks. `use_locking` and the devices are ignored.

    Gradients are matched with those of the other ranks' optimizer of this `name`, or without one by the number of the
    optimizer: every rank makes them in the same order, or names them. Those that step at the same time need different
    names, or none.

    Raises ValueError: an argument is wrong. UnsupportedError: Keras does not run on TensorFlow.
    """
    passes = checked_passes(backward_passes_per_step)
    if isinstance(optimizer, Distributed | DistributedV1):
        raise ValueError("the optimizer is one of DistributedOptimizer already: its gradients would be reduced twice")
    arguments = (compression, sparse_as_dense, num_groups if groups is None else groups, process_set)
    owner = f"optimizer {process_set.count_optimizer() if name is None else repr(name)}"
    method = Method(op, gradient_predivide_factor, *arguments, owner)
    members: dict[str, Any] = {"_method": method, "_local": Local(scale_local_gradients)}
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        if passes > 1:
            raise UnsupportedError("backward_passes_per_step > 1 with an optimizer of TensorFlow 1: use a Keras one")
        return _remade(optimizer, DistributedV1, members)
    if keras.backend.backend() != "tensorflow":
        raise UnsupportedError(f"Keras runs on {keras.backend.backend()}; set KERAS_BACKEND=tensorflow")
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ValueError(f"optimizer is a {type(optimizer).__name__}: give one of keras.optimizers")
    scaler = keras.optimizers.LossScaleOptimizer
    if keras.mixed_precision.dtype_policy().name == "mixed_float16" and not isinstance(optimizer, scaler):
        optimizer = scaler(optimizer)
    members |= {"_passes": passes, "_averages": average_aggregated_gradients}
    return _remade(optimizer, Distributed, members)


def PartialDistributedOptimizer(optimizer: Any, *arguments: Any, local_layers: Any = None, **options: Any) -> Any:
    """`DistributedOptimizer` that leaves the gradients of `local_layers` to this rank."""
    made = DistributedOptimizer(optimizer, *arguments, **options)
    for variable in variables_of(local_layers):
        made.register_local_var(variable)
    return made


def load_model(filepath: Any, custom_optimizers: Any = None, custom_objects: Any = None, **options: Any) -> keras.Model:
    """A saved Keras model, with its optimizer as one of DistributedOptimizer, which gets the `options`."""
    known = {its.__name__: its for its in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=known)
    model.optimizer = DistributedOptimizer(model.optimizer, **options)
    return model


def _remade(optimizer: Any, mixin: type, members: dict[str, Any]) -> Any:
    """An object that shares the optimizer's state, of a class that Keras saves under the optimizer's own name."""
    kind = type(optimizer)
    made: Any = object.__new__(type(kind.__name__, (mixin, kind), {"__module__": kind.__module__, **members}))
    object.__setattr__(made, "__dict__", optimizer.__dict__)  # Keras' own would track it
    return made


class Distributed:
    """Added to a Keras optimizer's class by DistributedOptimizer. Its copies reduce gradients, too."""

    _method: Method
    _local: Local
    _passes: int
    _averages: bool
    _checked: bool = False  # the model is the same on every rank
    _sums: _Sums | None = None

    @unconverted
    def apply(self, grads: Sequence[Gradient], trainable_variables: Any = None) -> None:
        """Reduce the gradients over all ranks, and apply them."""
        base = cast("Callable[[Any, Any], None]", super().apply)  # type: ignore[misc]
        if trainable_variables is None:
            trainable_variables = self._trainable_variables  # type: ignore[attr-defined]
        variables = list(trainable_variables)
        gradients = list(grads)
        if not self._checked:
            self._checked = True
            moving = [its for its, gradient in zip(variables, gradients, strict=True) if gradient is not None]
            check_same(moving, self._method.process_set, f"variables of {self._method.owner}")
        if self._passes == 1:
            base(self._local.reduce(gradients, variables, self._method), variables)
            return
        if self._sums is None:
            self._sums = _Sums(variables, self._passes, self._averages)
        if not self.built:  # type: ignore[has-type]
            with tf.init_scope():
                self.build(variables)  # type: ignore[attr-defined]
            self.built = True
        sums = self._sums

        def step() -> None:
            base(self._local.reduce(sums.taken(gradients), variables, self._method), variables)

        # Keras 3.3 has no `_iterations`; later ones divide `iterations` by the passes that they accumulate themselves.
        iterations: Any = getattr(self, "_iterations", self.iterations)  # type: ignore[attr-defined]
        sums.add(gradients, step, lambda: iterations.assign_add(1))

    def register_local_var(self, variable: Any) -> None:
        """Leave the gradient of a variable to this rank."""
        self._local.add(variable)


class _Sums:
    """Gradients that add up on this rank until they are reduced."""

    def __init__(self, variables: Sequence[Any], passes: int, averages: bool) -> None:
        self._passes, self._averages = passes, averages
        with tf.init_scope():
            self.counter = tf.Variable(0, trainable=False, name="ddl_passes")
            self._sums = [tf.Variable(tf.zeros(its.shape, its.dtype), trainable=False) for its in variables]

    def add(self, gradients: Sequence[Gradient], step: Callable[[], None], pause: Callable[[], Any]) -> None:
        """Add gradients, and then do `step` if they are enough, else `pause`."""
        for total, gradient in zip(self._sums, gradients, strict=True):
            if gradient is not None:
                total.assign_add(tf.convert_to_tensor(gradient))
        self.counter.assign_add(1)

        def stepped() -> tf.Tensor:
            step()
            self.counter.assign(0)
            for total in self._sums:
                total.assign(tf.zeros_like(total))
            return tf.constant(True)

        def paused() -> tf.Tensor:
            pause()
            return tf.constant(False)

        tf.cond(tf.equal(self.counter, self._passes), stepped, paused)

    def taken(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """The sums, or averages, of those gradients that are there."""
        factor = self._passes if self._averages else 1
        return [
            None if gradient is None else total / tf.cast(factor, total.dtype)
            for total, gradient in zip(self._sums, gradients, strict=True)
        ]


class DistributedV1:
    """Added to the class of an optimizer of TensorFlow 1 by DistributedOptimizer."""

    _method: Method
    _local: Local

    @unconverted
    def compute_gradients(self, *arguments: Any, **options: Any) -> list[tuple[Gradient, Any]]:
        """As the optimizer's own, reduced over all ranks."""
        pairs = super().compute_gradients(*arguments, **options)  # type: ignore[misc]
        gradients, variables = [its for its, _ in pairs], [its for _, its in pairs]
        return list(zip(self._local.reduce(gradients, variables, self._method), variables, strict=True))

    def register_local_var(self, variable: Any) -> None:
        """Leave the gradient of a variable to this rank."""
        self._local.add(variable)


def check_same(variables: Sequence[Any], process_set: ProcessSet, name: str | None = None) -> None:
    """Compare the variables of all ranks. Raises MismatchError, on every rank, that names two which differ."""
    if not process_set.included():
        return
    mine = [
        (getattr(its, "path", its.name), its.dtype if isinstance(its.dtype, str) else its.dtype.name, tuple(its.shape))
        for its in variables
    ]
    content = repr([its[1:] for its in mine])  # names may differ: Keras numbers its layers
    digests = allgather_object(hashlib.sha256(content.encode()).digest(), name=name, process_set=process_set)
    if len(set(digests)) == 1:
        return
    every = allgather_object(mine, name=name, process_set=process_set)
    other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    raise MismatchError(difference(every[0], every[other], process_set.ranks[0], process_set.ranks[other]))


Described = tuple[str, str, tuple[int, ...]]  # name, type and shape of a variable


def difference(one: Sequence[Described], other: Sequence[Described], rank: int, its: int) -> str:
    """In words, how the models of two ranks differ."""
    number = next(
        (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a[1:] != b[1:]),
        min(len(one), len(other)),
    )

    def named(model: Sequence[Described], rank: int) -> str:
        if number >= len(model):
            return f"rank {rank}'s has {len(model)} variables"
        name, dtype, shape = model[number]
        return f"variable {number + 1} of {len(model)} on rank {rank} is {name} ({dtype} of shape {shape})"

    return (
        f"rank {rank} and rank {its} train different models: {named(one, rank)}, but {named(other, its)}: build the "
        "same model on every rank, and give each variable a gradient on all ranks or on none (None leaves it out)"
    )
