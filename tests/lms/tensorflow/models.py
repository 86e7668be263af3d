"""Small Keras models of the kinds that people train, and a few steps of their training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import net_keras
import numpy as np
import tensorflow as tf

layers = keras.layers


def cnn() -> keras.Model:
    """Convolutions, BatchNorm and Dropout."""
    x = inputs = keras.Input((32, 32, 3))
    for width in (16, 32):
        x = layers.Conv2D(width, 3, padding="same")(x)
        x = layers.BatchNormalization()(x)
        x = layers.Dropout(0.2)(layers.ReLU()(x))
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def resnet() -> keras.Model:
    """Residual blocks."""
    inputs = keras.Input((32, 32, 3))
    x = layers.Conv2D(16, 3, padding="same", use_bias=False)(inputs)
    for width, stride in ((16, 1), (32, 2), (32, 1)):
        y = layers.BatchNormalization()(layers.Conv2D(width, 3, strides=stride, padding="same", use_bias=False)(x))
        y = layers.BatchNormalization()(layers.Conv2D(width, 3, padding="same", use_bias=False)(layers.ReLU()(y)))
        if stride > 1:
            x = layers.Conv2D(width, 1, strides=stride)(x)
        x = layers.ReLU()(layers.Add()([x, y]))
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def unet() -> keras.Model:
    """The example's, small, with one answer for an image."""
    net = net_keras.unet((32, 32, 3), 8, width=8)
    return keras.Model(net.inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(net.outputs[0])))


def lstm() -> keras.Model:
    """A while loop, whose inside stays as it is, between dense layers."""
    inputs = keras.Input((32, 96))
    x = layers.Dense(128, activation="tanh")(inputs)
    x = layers.LSTM(64, return_sequences=True)(x)
    x = layers.LayerNormalization()(layers.Dense(128, activation="gelu")(x))
    return keras.Model(inputs, layers.Dense(10)(layers.Flatten()(x)))


def transformer() -> keras.Model:
    """Two blocks with attention."""
    inputs = keras.Input((32, 96))
    x = layers.Dense(64)(inputs)
    for _ in range(2):
        y = layers.MultiHeadAttention(4, 16, dropout=0.1)(x, x)
        x = layers.LayerNormalization()(x + y)
        y = layers.Dense(64)(layers.Dense(256, activation="gelu")(x))
        x = layers.LayerNormalization()(x + layers.Dropout(0.1)(y))
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


class OwnStep(keras.Model):  # type: ignore[misc]
    """A train_step of its own, with a penalty in the loss and clipped gradients."""

    def train_step(self, data: Any) -> Any:
        """One step."""
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            loss += 1e-3 * tf.add_n([tf.reduce_sum(tf.square(one)) for one in self.trainable_variables])
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, self.trainable_variables), 1.0)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def own_step() -> keras.Model:
    """A custom train_step."""
    model = cnn()
    return OwnStep(model.inputs, model.outputs)


def resnet50() -> keras.Model:
    """ResNet50 of keras.applications."""
    return keras.applications.ResNet50(weights=None, input_shape=(48, 48, 3), classes=10, classifier_activation=None)


def efficientnet() -> keras.Model:
    """EfficientNetB0 of keras.applications."""
    return keras.applications.EfficientNetB0(
        weights=None, input_shape=(48, 48, 3), classes=10, classifier_activation=None
    )


def mobilenet() -> keras.Model:
    """MobileNetV2 of keras.applications."""
    return keras.applications.MobileNetV2(weights=None, input_shape=(48, 48, 3), classes=10, classifier_activation=None)


def bert() -> keras.Model:
    """KerasHub's BERT, small, with token numbers made of the inputs."""
    import keras_hub

    inputs = keras.Input((48,))
    tokens = keras.ops.cast(keras.ops.minimum(keras.ops.abs(inputs) * 200, 999), "int32")
    net = keras_hub.models.BertBackbone(
        vocabulary_size=1000, num_layers=3, num_heads=4, hidden_dim=64, intermediate_dim=256, max_sequence_length=48
    )
    every = {"token_ids": tokens, "segment_ids": tokens * 0, "padding_mask": tokens * 0 + 1}
    return keras.Model(inputs, layers.Dense(10)(net(every)["pooled_output"]))


def compiled(make: Callable[[], keras.Model], **options: Any) -> keras.Model:
    """The model with the same random weights each time."""
    keras.utils.set_random_seed(1)
    model = make()
    optimizer = options.pop("optimizer", None) or keras.optimizers.Adam()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, **{"jit_compile": False, **options})
    return model


def fit(
    model: keras.Model, callbacks: list[Any], *, times: int = 1, count: int = 40, batch: int = 16
) -> tuple[list[float], list[np.ndarray]]:
    """Losses and weights after `times` trainings on `count` random samples in `batch`es; the last one is smaller."""
    x = np.random.default_rng(0).normal(size=(count, *model.input_shape[1:])).astype("f4")
    y = np.arange(count) % 10
    losses = []
    for _ in range(times):
        run = model.fit(x, y, batch_size=batch, epochs=2, verbose=0, shuffle=False, callbacks=callbacks)
        losses += run.history["loss"]
    return losses, model.get_weights()


def same(ours: Any, theirs: Any) -> bool:
    """Whether losses and weights have the same bits."""
    return ours[0] == theirs[0] and all(map(np.array_equal, ours[1], theirs[1]))
