"""LMS for TensorFlow and Keras 3: the graph of a training step is edited once TensorFlow has optimized it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lms.tensorflow.decorator import Offload, Traced, offload
    from lms.tensorflow.keras import LMS

__all__ = ["LMS", "Offload", "Traced", "offload"]


def __getattr__(name: str) -> object:
    # `lms run` comes before the script has set what TensorFlow reads, and a tf.function does without Keras.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"lms.tensorflow.{'keras' if name == 'LMS' else 'decorator'}"), name)
