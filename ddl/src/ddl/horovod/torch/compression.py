"""How tensors are made smaller for the wire."""

from __future__ import annotations

import torch
from torch import Tensor


class Compressor:
    """Sends a tensor as another one. Subclass it for a method of your own: elements are reduced one by one."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, object]:
        """What is sent, and what `decompress` needs to know."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, context: object) -> Tensor:
        """The tensor that stands for what was received."""
        return tensor


class _Half(Compressor):
    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, object]:
        return (tensor.half() if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, context: object) -> Tensor:
        assert isinstance(context, torch.dtype)
        return tensor.to(context)


class Compression:
    """The methods that there are."""

    none = Compressor
    fp16 = _Half
