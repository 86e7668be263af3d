"""Horovod's interface for Keras: `import ddl.horovod.tensorflow.keras as hvd`, with `hvd.callbacks`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ddl.frontends.core.ops import Average, Op
from ddl.horovod.tensorflow import *  # noqa: F403
from ddl.tensorflow import callbacks as callbacks
from ddl.tensorflow import collectives
from ddl.tensorflow.compression import Compression, Compressor


def allreduce(  # type: ignore[no-redef]
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Op | None = None,
    compression: type[Compressor] = Compression.none,
) -> Any:
    """`value` reduced over all ranks, by default averaged."""
    arguments = (compression, op, prescale_factor, postscale_factor, name)
    return collectives.allreduce(value, average, "", "", *arguments)


def allgather(value: Any, name: str | None = None) -> tf.Tensor:  # type: ignore[no-redef]
    """Everyone's rows."""
    return collectives.allgather(value, name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> tf.Tensor:  # type: ignore[no-redef]
    """The root's value."""
    return collectives.broadcast(value, root_rank, name)


def reducescatter(value: Any, name: str | None = None, op: Op = Average) -> tf.Tensor:  # type: ignore[no-redef]
    """This rank's rows of the reduced value."""
    return collectives.reducescatter(value, op=op, name=name)
