"""How tensors are made smaller for the wire."""

from __future__ import annotations

import tensorflow as tf


class Compressor:
    """Sends a tensor as another one. Subclass it for a method of your own: elements are reduced one by one."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, object]:
        """What is sent, and what `decompress` needs to know."""
        return tensor, None

    @staticmethod
    def decompress(tensor: tf.Tensor, context: object) -> tf.Tensor:
        """The tensor that stands for what was received."""
        return tensor


class _Half(Compressor):
    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, object]:
        return (tf.cast(tensor, tf.float16) if tensor.dtype.is_floating else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: tf.Tensor, context: object) -> tf.Tensor:
        return tf.cast(tensor, context)


class Compression:
    """The methods that there are."""

    none = Compressor
    fp16 = _Half
