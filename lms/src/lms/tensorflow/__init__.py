"""LMS for TensorFlow and Keras 3: the graph of a training step is edited while it is traced."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lms.tensorflow.offload import Offload, Traced, offload

if TYPE_CHECKING:
    from lms.tensorflow.keras import LMS

__all__ = ["LMS", "Offload", "Traced", "offload"]


def __getattr__(name: str) -> object:
    if name != "LMS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lms.tensorflow.keras import LMS  # Keras takes a second to import, and a tf.function does without

    return LMS
