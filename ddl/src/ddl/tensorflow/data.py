"""Each rank's share of the data."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ddl.tensorflow.process_sets import rank, size


def shard(data: Any) -> Any:
    """This rank's share: every size()-th element of a tf.data.Dataset, or row of arrays (or tuples, dicts of them).

    All ranks get the same number: up to size() - 1 elements at the end are left out. Of a Dataset whose number of
    elements is not known, the last ranks may get one less: give `fit` steps_per_epoch then. Shard before `shuffle` and
    `batch`.
    """
    if isinstance(data, tf.data.Dataset):
        count = int(data.cardinality())
        return (data.take(count - count % size()) if count >= 0 else data).shard(size(), rank())
    return tf.nest.map_structure(lambda array: array[rank() : len(array) - len(array) % size() : size()], data)
