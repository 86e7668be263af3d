"""What a net's blobs begin with: Caffe's fillers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from google.protobuf.message import Message
from torch import Tensor

from bascule_caffe.errors import NetError

Filler = Callable[[Message, Tensor, torch.Generator | None], Tensor]


def fill(filler: Message, shape: Sequence[int], generator: torch.Generator | None = None) -> Tensor:
    """A new tensor of float32 on the CPU, filled as a FillerParameter says.

    Raises:
        NetError: the filler's type is unknown, the shape is none that it fills, or there is no memory for it.
    """
    if filler.type not in FILLERS:
        raise NetError(f"there is no filler '{filler.type}'; allowed are {', '.join(sorted(FILLERS))}")
    try:
        blob = torch.empty(tuple(shape))
    except RuntimeError as error:
        raise NetError(f"a blob of {'x'.join(map(str, shape))} numbers cannot be made: {error}") from None
    return FILLERS[filler.type](filler, blob, generator)


def _gaussian(filler: Message, blob: Tensor, generator: torch.Generator | None) -> Tensor:
    blob.normal_(filler.mean, filler.std, generator=generator)
    if filler.sparse >= 0:  # so many inputs of each output are not zero, on average
        blob *= torch.empty_like(blob).bernoulli_(min(1.0, filler.sparse / blob.shape[0]), generator=generator)
    return blob


def _positive_unitball(_: Message, blob: Tensor, generator: torch.Generator | None) -> Tensor:
    rows = blob.uniform_(0, 1, generator=generator).view(blob.shape[0], -1)
    rows /= rows.sum(1, keepdim=True)
    return blob


def _bound(filler: Message, blob: Tensor, gain: float) -> float:
    """The root of gain / fan."""
    count = blob.numel()
    fan_in = count / blob.shape[0]
    fan_out = count / blob.shape[1] if blob.dim() > 1 else count
    fans = {filler.FAN_IN: fan_in, filler.FAN_OUT: fan_out, filler.AVERAGE: (fan_in + fan_out) / 2}
    return math.sqrt(gain / fans[filler.variance_norm])


def _xavier(filler: Message, blob: Tensor, generator: torch.Generator | None) -> Tensor:
    bound = _bound(filler, blob, 3)
    return blob.uniform_(-bound, bound, generator=generator)


def _bilinear(_: Message, blob: Tensor, __: torch.Generator | None) -> Tensor:
    if blob.dim() != 4 or blob.shape[2] != blob.shape[3]:
        raise NetError(f"the filler 'bilinear' is for blobs of 4 axes and square kernels, not for {tuple(blob.shape)}")
    factor = math.ceil(blob.shape[3] / 2)
    centre = (blob.shape[3] - 1) / (2 * factor)
    line = 1 - (torch.arange(blob.shape[3], dtype=torch.float64) / factor - centre).abs()
    return blob.copy_(line[:, None] * line)


FILLERS: dict[str, Filler] = {
    "bilinear": _bilinear,
    "constant": lambda filler, blob, _: blob.fill_(filler.value),
    "gaussian": _gaussian,
    "msra": lambda filler, blob, generator: blob.normal_(0, _bound(filler, blob, 2), generator=generator),
    "positive_unitball": _positive_unitball,
    "uniform": lambda filler, blob, generator: blob.uniform_(filler.min, filler.max, generator=generator),
    "xavier": _xavier,
}
