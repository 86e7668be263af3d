"""Losses and weights are those of plain training bit by bit, with TensorFlow's optimizers as they are by default."""

from __future__ import annotations

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="no TensorFlow")
keras = pytest.importorskip("keras", reason="no TensorFlow")

from tests.lms.tensorflow import models  # noqa: E402
from tests.lms.tensorflow.models import cnn, compiled, fit, same  # noqa: E402

from lms.tensorflow import LMS  # noqa: E402


def check(make, budget="20%", *, times=1, count=24, batch=16, optimizer=None, **options) -> LMS:
    def model():
        return compiled(make, optimizer=optimizer() if optimizer else None, **options)

    callback = LMS(budget=budget)
    plain = fit(model(), [], times=times, count=count, batch=batch)
    assert same(fit(model(), [callback], times=times, count=count, batch=batch), plain)
    assert callback.stats()["swapped"] > 0
    assert callback.stats()["live"] == 0
    return callback


@pytest.mark.parametrize("make", ["cnn", "resnet", "unet", "lstm", "transformer", "own_step"])
def test_models(make: str) -> None:
    check(getattr(models, make))  # the last batch is smaller, so that tracing does not know the batch's size


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("make", ["resnet50", "efficientnet", "mobilenet"])
def test_models_of_keras_applications(make: str) -> None:
    check(getattr(models, make), count=12, batch=8)


@pytest.mark.timeout(600)
def test_a_bert_of_kerashub() -> None:
    pytest.importorskip("keras_hub", reason="no KerasHub")
    check(models.bert)


@pytest.mark.parametrize("budget", ["0%", "50%"])
def test_budgets(budget: str) -> None:
    check(cnn, budget)


def test_steps_per_execution_and_fitting_twice() -> None:
    check(cnn, times=2, steps_per_execution=3, count=64)


def test_accumulated_gradients() -> None:
    check(cnn, optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2))


def test_mixed_precision() -> None:
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        check(cnn, budget="0%")
    finally:
        keras.mixed_precision.set_global_policy("float32")


def test_a_model_that_is_saved_and_loaded_in_between(tmp_path) -> None:
    def trained(callbacks: list) -> tuple:
        model = compiled(cnn)
        fit(model, callbacks, count=24)
        model.save(tmp_path / "model.keras")
        return fit(keras.models.load_model(tmp_path / "model.keras"), callbacks, count=24)

    assert same(trained([LMS(budget="20%")]), trained([]))


def on_devices(callbacks: list, scope) -> tuple:
    keras.utils.clear_session()
    with scope():
        model = compiled(cnn)
        x = np.random.default_rng(0).normal(size=(32, 32, 32, 3)).astype("f4")
        data = tf.data.Dataset.from_tensor_slices((x, np.arange(32) % 10)).batch(16, drop_remainder=True)
        return model.fit(data, epochs=2, verbose=0, callbacks=callbacks).history["loss"], model.get_weights()


def test_replicas() -> None:
    def scope():
        return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope()

    callback = LMS(budget="0%")
    assert same(on_devices([callback], scope), on_devices([], scope))
    assert [traced.swapped > 0 for traced in callback.offload.traces] == [True, True]


def test_the_memory_of_another_device() -> None:
    callback = LMS(budget="0%", host="/device:CPU:0")
    assert same(on_devices([callback], lambda: tf.device("CPU:1")), on_devices([], lambda: tf.device("CPU:1")))
    assert callback.stats()["swapped"] > 0
