"""The U-Net in Keras, of two or three dimensions (Ronneberger et al. 2015, arXiv:1505.04597; Cicek et al. 2016)."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers


def unet(
    shape: tuple[int, ...], classes: int, width: int = 16, depth: int = 3, batch: int | None = None
) -> keras.Model:
    """Images of `shape` (sides, then channels) to logits of `classes` for each pixel or voxel.

    `width` is the number of channels at full resolution, doubled at each of the `depth` poolings. Each side must be a
    multiple of 2 to the power of `depth`; raises ValueError otherwise. `batch` fixes the number of images.
    """
    sides = len(shape) - 1
    if any(side % 2**depth for side in shape[:-1]):
        raise ValueError(f"shape={shape}: expected sides that are multiples of {2**depth}")
    convolve, pool = (layers.Conv2D, layers.MaxPooling2D) if sides == 2 else (layers.Conv3D, layers.MaxPooling3D)
    grow = layers.Conv2DTranspose if sides == 2 else layers.Conv3DTranspose

    def block(x: Any, width: int) -> Any:
        for _ in range(2):
            x = layers.ReLU()(layers.BatchNormalization()(convolve(width, 3, padding="same", use_bias=False)(x)))
        return x

    x = inputs = keras.Input(shape, batch_size=batch)
    skips = []
    for level in range(depth):
        x = block(x, width << level)
        skips.append(x)
        x = pool()(x)
    x = block(x, width << depth)
    for level in reversed(range(depth)):
        x = grow(width << level, 2, strides=2)(x)
        x = block(layers.Concatenate()([x, skips[level]]), width << level)
    return keras.Model(inputs, convolve(classes, 1)(x))
