"""Keras' `fit` over DDL, compared with one process that takes the whole batches: losses, and the bits on all ranks."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import keras
import numpy as np
import tensorflow as tf

import ddl.keras as ddl
import ddl.tensorflow as ddl_tf
from ddl.tensorflow import operations

if sys.argv[1:] == ["numpy_function"]:
    operations.library = lambda: None
ddl.init()
RANK, SIZE = ddl.rank(), ddl.size()
BATCH, COUNT = 8, 64
generator = np.random.default_rng(0)
IMAGES = generator.normal(size=(COUNT, 8, 8, 1)).astype("f4")
LABELS = generator.integers(0, 4, COUNT)
WORDS = generator.integers(0, 20, (COUNT, 5))


def cnn() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(16, activation="relu"),
            layers.Dense(4),
        ]
    )


def embedding() -> keras.Model:
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((5,), dtype="int32"), layers.Embedding(20, 6), layers.Flatten(), layers.Dense(4)]
    )


def compiled(model: keras.Model, optimizer: keras.optimizers.Optimizer, **options) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], **options)
    return model


def batches(inputs: np.ndarray, rank: int = 0, size: int = 1) -> tf.data.Dataset:
    """This rank's share of each batch of BATCH."""
    data = tf.data.Dataset.from_tensor_slices((inputs, LABELS))
    return data.shard(size, rank).batch(BATCH // size)


def fit(model: keras.Model, inputs: np.ndarray, *, epochs: int = 2, **options) -> list[float]:
    callbacks = [ddl.DDLCallback(), ddl.DDLGlobalVariablesCallback()]
    return model.fit(batches(inputs, RANK, SIZE), epochs=epochs, callbacks=callbacks, verbose=0, **options).history[
        "loss"
    ]


def alone(model: keras.Model, inputs: np.ndarray, epochs: int = 2) -> list[float]:
    return model.fit(batches(inputs), epochs=epochs, verbose=0).history["loss"]


def same_bits(model: keras.Model) -> None:
    content = b"".join(np.asarray(its).tobytes() for its in (*model.variables, *model.optimizer.variables))
    assert len(set(ddl.allgather_object(hashlib.sha256(content).hexdigest()))) == 1


def close(losses: list[float], others: list[float]) -> None:
    assert losses[-1] < losses[0], losses
    np.testing.assert_allclose(losses, others, 1e-5)


def trains(make, inputs, optimizer, *, options=None, **compile_options) -> keras.Model:
    """Train over DDL, and alone from the same weights."""
    keras.utils.set_random_seed(100 + RANK)  # every rank has weights of its own, until it gets rank 0's
    model = compiled(make(), ddl.DistributedOptimizer(optimizer(), **(options or {})), **compile_options)
    weights = ddl.broadcast_object(model.get_weights())
    losses = fit(model, inputs)
    same_bits(model)
    other = compiled(make(), optimizer())
    other.set_weights(weights)
    close(losses, alone(other, inputs))
    for one, its in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(one, its, 1e-3, 1e-5)
    return model


def fits() -> None:
    momentum = lambda: keras.optimizers.SGD(0.05, momentum=0.9)  # noqa: E731
    trains(cnn, IMAGES, momentum)
    trains(cnn, IMAGES, lambda: keras.optimizers.Adam(1e-2, global_clipnorm=0.5), options={"groups": 2})
    trains(cnn, IMAGES, momentum, options={"gradient_predivide_factor": 2.0}, steps_per_execution=4)
    trains(embedding, WORDS, momentum)
    trains(embedding, WORDS, momentum, options={"sparse_as_dense": True}, run_eagerly=True)


def saved() -> None:
    """A saved model has the plain optimizer, with its state; it is loaded with and without DDL."""
    model = trains(cnn, IMAGES, lambda: keras.optimizers.Adam(1e-2))
    assert isinstance(model.optimizer, keras.optimizers.Adam)
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/model.keras")
        plain = keras.models.load_model(f"{folder}/model.keras")
        assert type(plain.optimizer) is keras.optimizers.Adam
        again = ddl.load_model(f"{folder}/model.keras")
    for one, other in zip(again.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(one, other)
    close(fit(again, IMAGES), alone(plain, IMAGES))
    same_bits(again)
    copy = type(model.optimizer).from_config(model.optimizer.get_config())
    variable = keras.Variable([0.0])
    copy.apply([tf.constant([1.0 + RANK])], [variable])
    assert float(ddl.allreduce(variable, op=ddl.Max)[0]) == float(variable[0]), "a copy reduces gradients, too"


def unbuilt() -> None:
    """A model without variables when training begins gets rank 0's after the first batch."""
    keras.utils.set_random_seed(RANK)
    model = compiled(
        keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(4)]),
        ddl.DistributedOptimizer(keras.optimizers.SGD(0.01)),
    )
    fit(model, IMAGES)
    same_bits(model)


def accumulates() -> None:
    """Two batches add up to a step."""
    for averages in (False, True):
        keras.utils.set_random_seed(1)
        optimizer = ddl.DistributedOptimizer(
            keras.optimizers.SGD(0.05), backward_passes_per_step=2, average_aggregated_gradients=averages
        )
        model = compiled(cnn(), optimizer)
        other = compiled(cnn(), keras.optimizers.SGD(0.05 if averages else 0.1, gradient_accumulation_steps=2))
        other.set_weights(model.get_weights())
        close(fit(model, IMAGES), alone(other, IMAGES))
        same_bits(model)
    fit(model, IMAGES, epochs=1)


def half() -> None:
    """Ranks decide together whether gradients are finite."""
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        keras.utils.set_random_seed(2)
        scaler = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=2.0**20)
        for optimizer in (ddl.DistributedOptimizer(keras.optimizers.SGD(0.05)), ddl.DistributedOptimizer(scaler)):
            model = compiled(cnn(), optimizer)
            assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
            assert model.optimizer is optimizer
            # One rank's gradients overflow.
            losses = fit(model, IMAGES * (1 + 2000 * (RANK == SIZE - 1)))
            assert len(losses) == 2
            same_bits(model)
    finally:
        keras.mixed_precision.set_global_policy("float32")


def steps() -> None:
    """A step of the script's own."""
    keras.utils.set_random_seed(3)
    model, other = cnn(), cnn()
    other.set_weights(model.get_weights())
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step_of(model, optimizer, tape_of):
        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = loss_of(y, model(x, training=True))
            gradients = tape_of(tape).gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        return step

    step = step_of(model, keras.optimizers.SGD(0.05), ddl_tf.DistributedGradientTape)
    losses = [float(ddl.allreduce(step(x, y))) for x, y in batches(IMAGES, RANK, SIZE)]
    plain = step_of(other, keras.optimizers.SGD(0.05), lambda tape: tape)
    np.testing.assert_allclose(losses, [float(plain(x, y)) for x, y in batches(IMAGES)], 1e-5)


def metrics() -> None:
    """A metric is averaged over ranks, also one that has a value for each class."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(2, activation="softmax")])
    optimizer = ddl.DistributedOptimizer(keras.optimizers.SGD(0.0))
    model.compile(optimizer, "categorical_crossentropy", metrics=["accuracy", keras.metrics.F1Score()])
    classes = np.eye(2)[(np.arange(8) < 4 + RANK).astype(int)]
    logs = model.evaluate(np.zeros((8, 1)), classes, return_dict=True, verbose=0)
    every = ddl.allgather_object(logs)
    ddl.MetricAverageCallback().on_epoch_end(0, logs)
    assert logs["f1_score"].shape == (2,)
    for name, value in logs.items():
        np.testing.assert_allclose(value, np.mean([its[name] for its in every], axis=0), 1e-6)


def rates() -> None:
    """The learning rate rises batch by batch; velocities change with it."""
    keras.utils.set_random_seed(4)
    model = compiled(cnn(), ddl.DistributedOptimizer(keras.optimizers.SGD(0.1 * SIZE, momentum=0.9)))
    seen = []
    see = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda *_, **__: seen.append(float(model.optimizer.learning_rate.numpy()))
    )
    warmup = ddl.LearningRateWarmupCallback(0.1 * SIZE, warmup_epochs=2)
    history = model.fit(batches(IMAGES, RANK, SIZE), epochs=3, callbacks=[warmup, see], verbose=0).history
    count = COUNT // BATCH
    rising = [0.1 * (1 + (batch + 1) / count * (SIZE - 1) / 2) for batch in range(2 * count)]
    np.testing.assert_allclose(seen, rising + [0.1 * SIZE] * count, 1e-5)
    np.testing.assert_allclose(history["lr"], [seen[count - 1], 0.1 * SIZE, 0.1 * SIZE], 1e-5)
    momentum = model.optimizer.momentums[0]
    before = momentum.numpy()
    warmup._set(0.05 * SIZE)
    np.testing.assert_allclose(momentum, before / 2, 1e-5)


def shards() -> None:
    rows = np.arange(4 * SIZE + 1)
    assert ddl.shard(rows).tolist() == [RANK + SIZE * index for index in range(4)]
    inputs, labels = ddl.shard((rows, rows * 2))
    assert labels.tolist() == (inputs * 2).tolist()
    data = ddl.shard(tf.data.Dataset.from_tensor_slices(rows))
    assert [int(its) for its in data] == ddl.shard(rows).tolist()


for part in (fits, saved, unbuilt, accumulates, half, steps, metrics, rates, shards):
    part()
ddl.shutdown()
print(f"rank {RANK}: all right")
