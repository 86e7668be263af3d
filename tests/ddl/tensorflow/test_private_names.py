"""Each name that DDL uses and that neither TensorFlow nor Keras promises to keep."""

from __future__ import annotations

import inspect

import pytest

keras = pytest.importorskip("keras", reason="no TensorFlow")


def test_an_optimizer_has_its_variables_and_counts_its_steps() -> None:
    optimizer = keras.optimizers.SGD()
    optimizer.build([keras.Variable([1.0])])
    gone = "of Keras' optimizers, which ddl/tensorflow/optimizer.py uses, is gone"
    assert len(optimizer._trainable_variables) == 1, f"_trainable_variables {gone}"
    assert hasattr(getattr(optimizer, "_iterations", optimizer.iterations), "assign_add"), f"_iterations {gone}"


def test_an_optimizer_applies_gradients_by_one_method() -> None:
    parameters = list(inspect.signature(keras.optimizers.Optimizer.apply).parameters)
    assert parameters == ["self", "grads", "trainable_variables"], "ddl/tensorflow/optimizer.py overrides it"


def test_an_optimizer_with_momentum_has_velocities() -> None:
    optimizer = keras.optimizers.SGD(momentum=0.9)
    optimizer.build([keras.Variable([1.0])])
    velocities = getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", None)
    assert velocities, "momentums of Keras' SGD, which ddl/tensorflow/callbacks.py corrects, are gone"


def test_a_fit_has_a_train_function_that_can_be_made_again() -> None:
    assert "force" in inspect.signature(keras.Model.make_train_function).parameters
