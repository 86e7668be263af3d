"""What a net's blobs begin with: Caffe's fillers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from google.protobuf.message import Message
from torch import Tensor

from bascule_caffe.errors import NetError


def fill(filler: Message, shape: Sequence[int], generator: torch.Generator | None = None) -> Tensor:
    """A new tensor of float32 on the CPU, filled as a FillerParameter says.

    Raises:
        NetError: the filler's type is unknown, or the shape is none that it fills.
    """
    if filler.type not in FILLERS:
        raise NetError(f"there is no filler '{filler.type}'; allowed are {', '.join(sorted(FILLERS))}")
    return FILLERS[filler.type](filler, torch.empty(tuple(shape)), generator)


def _constant(filler: Message, blob: Tensor, _: torch.Generator | None) -> Tensor:
    return blob.fill_(filler.value)


def _uniform(filler: Message, blob: Tensor, generator: torch.Generator | None) -> Tensor:
    return blob.uniform_(filler.min, filler.max, generator=generator)


def _gaussian(filler: Message, blob: Tensor, generator: torch.Generator | None) -> Tensor:
    blob.normal_(filler.mean, filler.std, generator=generator)
    if filler.sparse >= 0:  # so many inputs of each output are not zero, on average
        blob *= torch.empty_like(blob).bernoulli_(min(1.0, filler.sparse / blob.shape[0]), generator=generator)
    return blob


def _positive_unitball(_: Message, blob: Tensor, generator: torch.Generator | None) -> Tensor:
    rows = blob.uniform_(0, 1, generator=generator).view(blob.shape[0], -1)
    rows /= rows.sum(1, keepdim=True)
    return blob


def _fan(filler: Message, blob: Tensor) -> float:
    count = blob.numel()
    fan_in = count / blob.shape[0]
    fan_out = count / blob.shape[1] if blob.dim() > 1 else count
    return {filler.FAN_IN: fan_in, filler.FAN_OUT: fan_out}.get(filler.variance_norm, (fan_in + fan_out) / 2)


def _xavier(filler: Message, blob: Tensor, generator: torch.Generator | None) -> Tensor:
    bound = math.sqrt(3 / _fan(filler, blob))
    return blob.uniform_(-bound, bound, generator=generator)


def _msra(filler: Message, blob: Tensor, generator: torch.Generator | None) -> Tensor:
    return blob.normal_(0, math.sqrt(2 / _fan(filler, blob)), generator=generator)


def _bilinear(_: Message, blob: Tensor, __: torch.Generator | None) -> Tensor:
    if blob.dim() != 4 or blob.shape[2] != blob.shape[3]:
        raise NetError(f"the filler 'bilinear' is for blobs of 4 axes and square kernels, not for {tuple(blob.shape)}")
    factor = math.ceil(blob.shape[3] / 2)
    centre = (blob.shape[3] - 1) / (2 * factor)
    line = 1 - (torch.arange(blob.shape[3], dtype=torch.float64) / factor - centre).abs()
    return blob.copy_(line[:, None] * line)


FILLERS: dict[str, Callable[[Message, Tensor, torch.Generator | None], Tensor]] = {
    "bilinear": _bilinear,
    "constant": _constant,
    "gaussian": _gaussian,
    "msra": _msra,
    "positive_unitball": _positive_unitball,
    "uniform": _uniform,
    "xavier": _xavier,
}
