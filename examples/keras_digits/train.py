"""Train Keras on handwritten digits over DDL.

    ddlrun -np 4 python examples/keras_digits/train.py

In this repository `ci/setup_tensorflow` makes a Python for it, out/tensorflow/bin/python; .venv/bin/ddlrun starts it.
At its end rank 0 trains once more, alone on the whole batches, and compares.
"""

from __future__ import annotations

import argparse
import hashlib

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import ddl.keras as ddl

TRAIN = 1500


def data() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """1,500 images to train with, 297 to test with; of shape (8, 8, 1), with labels from 0 to 9."""
    images, labels = load_digits(return_X_y=True)
    inputs = (images / 16).astype("float32").reshape(-1, 8, 8, 1)
    return (inputs[:TRAIN], labels[:TRAIN]), (inputs[TRAIN:], labels[TRAIN:])


def net(seed: int) -> keras.Model:
    """A layer of convolutions and one of a perceptron."""
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


def compile_with(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
    """The same loss and metric for both trainings."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"])


def main() -> None:
    """Train on all ranks, then on one, and compare."""
    parser = argparse.ArgumentParser(description="Train Keras on handwritten digits over DDL.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=60, help="images a step, over all ranks")
    parser.add_argument("--lr", type=float, default=0.1)
    options = parser.parse_args()

    ddl.init()
    if options.batch % ddl.size() or TRAIN % options.batch:
        raise SystemExit(f"--batch {options.batch} must be a multiple of the {ddl.size()} ranks, and divide {TRAIN}")
    train, test = data()
    # Every rank begins with weights of its own, and gets rank 0's.
    model = net(seed=ddl.rank())
    start = ddl.broadcast_object(model.get_weights())
    compile_with(model, ddl.DistributedOptimizer(keras.optimizers.SGD(options.lr, momentum=0.9)))
    history = model.fit(
        tf.data.Dataset.from_tensor_slices(ddl.shard(train)).batch(options.batch // ddl.size()),
        epochs=options.epochs,
        callbacks=[ddl.DDLCallback(), ddl.DDLGlobalVariablesCallback()],
        verbose=2 if ddl.rank() == 0 else 0,
    )
    losses = history.history["loss"]

    content = b"".join(weights.tobytes() for weights in model.get_weights())
    prints = ddl.allgather_object(hashlib.sha256(content).hexdigest())
    if ddl.rank() == 0:
        accuracy = model.evaluate(*test, verbose=0)[1]
        print(f"{ddl.size()} ranks: loss {losses[0]:.6f} -> {losses[-1]:.6f}, {accuracy:.1%} of the test images right")
        model.set_weights(start)
        compile_with(model, keras.optimizers.SGD(options.lr, momentum=0.9))
        whole = tf.data.Dataset.from_tensor_slices(train).batch(options.batch)
        others = model.fit(whole, epochs=options.epochs, verbose=0).history["loss"]
        apart = max(abs(one - other) / other for one, other in zip(losses, others, strict=True))
        print(f"the same in one process: loss {others[0]:.6f} -> {others[-1]:.6f}, at most {apart:.1e} of it apart")
        print(f"parameters: {'the same bits on every rank' if len(set(prints)) == 1 else 'DIFFERENT on some ranks'}")
    ddl.shutdown()


if __name__ == "__main__":
    main()
