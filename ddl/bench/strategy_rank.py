"""A rank of strategy.py: `strategy_rank.py ROUNDS FILE`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import ddl.tensorflow as ddl
from ddl.tensorflow.gradients import Method


def main(rounds: int, file: Path) -> None:
    """Reduce the same gradients in turn, and compare the results."""
    strategy = tf.distribute.MultiWorkerMirroredStrategy()  # first: it configures TensorFlow
    ddl.init()
    rank, size = ddl.rank(), ddl.size()
    model = keras.applications.MobileNetV2(alpha=0.5, weights=None, classes=100, input_shape=(64, 64, 3))
    shapes = [tuple(its.shape) for its in model.trainable_variables]
    generator = np.random.default_rng(rank)
    gradients = [tf.constant(generator.normal(size=shape), tf.float32) for shape in shapes]
    method = Method()

    def replica() -> Any:
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, gradients)

    by_ddl = tf.function(lambda: method.reduce(gradients, gradients))
    by_strategy = tf.function(lambda: strategy.run(replica))
    ways = {"ddl": by_ddl, "strategy": by_strategy}
    sums = {name: function() for name, function in ways.items()}  # traced, and connected
    for one, other in zip(sums["ddl"], sums["strategy"], strict=True):
        np.testing.assert_allclose(one * size, other, 1e-4, 1e-4)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in sorted(ways, reverse=number % 2 == 1):
            ddl.barrier()
            begin = time.perf_counter()
            ways[name]()
            took = ddl.allgather_object(time.perf_counter() - begin)
            seconds[name].append(max(took))
    if rank == 0:
        nbytes = sum(int(np.prod(shape)) * 4 for shape in shapes)
        found = {"seconds": seconds, "bytes": nbytes, "tensors": len(shapes), "tensorflow": tf.__version__}
        file.write_text(json.dumps(found))
    ddl.barrier()
    ddl.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
