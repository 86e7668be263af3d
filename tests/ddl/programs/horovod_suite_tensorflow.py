"""Plugin of pytest for `make horovod-suite`: Horovod's names for TensorFlow and Keras are ours."""

from __future__ import annotations

import sys

import keras
import parameterized as parameterized  # before there is a mock, which it would take for another one
import pytest
import tensorflow as tf
from packaging.version import parse
from tests.ddl.programs.horovod_suite import module
from tests.ddl.programs.horovod_suite import pytest_runtest_logreport as pytest_runtest_logreport

import ddl.horovod
import ddl.horovod.tensorflow as hvd
import ddl.horovod.tensorflow.keras as hvd_keras

sys.modules |= {"horovod.tensorflow": hvd, "horovod.tensorflow.keras": hvd_keras, "horovod.keras": hvd_keras}
# What the tests ask of Horovod beside its interface.
ddl.horovod.keras = hvd_keras
hvd._executing_eagerly = tf.executing_eagerly
module("horovod.tensorflow.util", _executing_eagerly=tf.executing_eagerly)
hvd.util = sys.modules["horovod.tensorflow.util"]
module("horovod.common")
module("horovod.common.util", is_version_greater_equal_than=lambda version, other: parse(version) >= parse(other))

# Keras 2's names in the tests of Keras: what they are about is there under Keras 3's.
keras.Variable.ref = lambda self: self.value.ref()
keras.optimizers.Optimizer.lr = property(lambda self: self.learning_rate)
_keras = sys.modules["keras._tf_keras.keras"]
_keras.losses.mean_squared_error = keras.losses.MeanSquaredError()
_keras.layers.ThresholdedReLU = lambda theta: keras.layers.ReLU(threshold=theta)
_rmsprop, _compile = keras.optimizers.RMSprop, keras.Model.compile
_keras.optimizers.RMSprop = lambda lr: _rmsprop(lr)


def _compile_of_keras_2(
    model: keras.Model, *args: object, experimental_run_tf_function: object = None, **others: object
) -> None:
    _compile(model, *args, **others)


keras.Model.compile = _compile_of_keras_2

# What these tests are about is not there. The page of results counts them with the reason.
_NOT_THERE = {"elastic": "elastic", "syncbn": "SyncBatchNormalization", "legacy": "the optimizers of Keras 2"}
_NOT_THERE_FOR_KERAS = dict.fromkeys(
    ("grad_aggregation", "gradient_aggregation", "partial_distributed"),
    "_compute_gradients and _agg_helper, which Horovod adds to the optimizers of Keras 2",
)


@pytest.fixture(autouse=True)
def _skip_what_is_not_there(request: pytest.FixtureRequest) -> None:
    lacks = _NOT_THERE | (_NOT_THERE_FOR_KERAS if "keras" in request.node.path.name else {})
    for word, what in lacks.items():
        if word in request.node.name:
            pytest.skip(f"DDL has not: {what}")
