"""A tape whose gradients are reduced over all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import tensorflow as tf

from ddl.frontends.core.ops import Average, Op
from ddl.tensorflow.collectives import unconverted
from ddl.tensorflow.compression import Compression, Compressor
from ddl.tensorflow.gradients import Gradient, Method
from ddl.tensorflow.process_sets import ProcessSet, global_process_set


class Local:
    """Variables of this rank alone: their gradients are not reduced, but divided by the number of ranks if `scales`."""

    def __init__(self, scales: bool = True) -> None:
        self._scales = scales
        self._variables: list[Any] = []

    def add(self, variable: Any) -> None:
        """Make a variable one of this rank alone."""
        self._variables.append(variable)

    def has(self, variable: Any) -> bool:
        """Whether it is one."""
        return any(its is variable or getattr(variable, "value", None) is its for its in self._variables)

    def reduce(self, gradients: Sequence[Gradient], variables: Sequence[Any], method: Method) -> list[Gradient]:
        """The gradients: those of other variables are reduced."""
        mine = [self.has(variable) for variable in variables]
        others = [None if here else its for its, here in zip(gradients, mine, strict=True)]
        reduced = method.reduce(others, variables)
        factor = 1 / method.process_set.size() if self._scales else 1.0
        return [
            _scaled(its, factor) if here and its is not None else other
            for its, here, other in zip(gradients, mine, reduced, strict=True)
        ]


def _scaled(gradient: Gradient, factor: float) -> Gradient:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor


class DistributedTape(tf.GradientTape):  # type: ignore[misc]
    """Added to a tape's class by DistributedGradientTape."""

    _method: Method
    _local: Local

    @unconverted
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
    ) -> Any:
        """As the tape's own, reduced over all ranks."""
        gradients = super().gradient(target, sources, output_gradients, unconnected_gradients)
        # IndexedSlices are a structure themselves.
        flat = _flat(gradients)
        return tf.nest.pack_sequence_as(sources, self._local.reduce(flat, tf.nest.flatten(sources), self._method))

    def register_local_source(self, source: Any) -> None:
        """Leave the gradient of a variable to this rank."""
        self._local.add(source)

    def get_local_and_global_gradients(
        self, target: Any, sources: Sequence[Any], output_gradients: Any = None
    ) -> tuple[list[tuple[Any, Gradient]], list[tuple[Any, Gradient]]]:
        """Pairs of variables and gradients: those of this rank alone, and the others."""
        pairs = list(zip(sources, self.gradient(target, sources, output_gradients), strict=True))
        local = [self._local.has(source) for source in sources]
        return (
            [pair for pair, here in zip(pairs, local, strict=True) if here],
            [pair for pair, here in zip(pairs, local, strict=True) if not here],
        )


def _flat(structure: Any) -> list[Any]:
    return cast("list[Any]", tf.nest.flatten(structure, expand_composites=False))


def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: Op = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> DistributedTape:
    """`gradtape` as one whose `gradient` is reduced over all ranks. The arguments are those of DistributedOptimizer."""
    arguments = (compression, sparse_as_dense, num_groups if groups is None else groups, process_set)
    kind = type(gradtape)
    made = cast(DistributedTape, object.__new__(type(kind.__name__, (DistributedTape, kind), {})))
    made.__dict__ = gradtape.__dict__  # what it has recorded, and what it will
    made._method = Method(op, gradient_predivide_factor, *arguments)
    made._local = Local(scale_local_gradients)
    return made


def PartialDistributedGradientTape(
    gradtape: tf.GradientTape, *arguments: Any, local_layers: Any = None, **options: Any
) -> DistributedTape:
    """`DistributedGradientTape` that leaves the gradients of `local_layers` to this rank."""
    made = DistributedGradientTape(gradtape, *arguments, **options)
    for variable in variables_of(local_layers):
        made.register_local_source(variable)
    return made


def variables_of(layers: Any) -> list[Any]:
    """The trainable variables of a layer, or of several. Raises ValueError for anything else."""
    every = [] if layers is None else list(layers) if isinstance(layers, list | tuple | set) else [layers]
    if not all(hasattr(layer, "trainable_weights") for layer in every):
        raise ValueError(f"local_layers is {layers!r}: give a Keras layer, or a list of layers")
    return [variable for layer in every for variable in layer.trainable_weights]
