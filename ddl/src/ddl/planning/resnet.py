"""ResNet-50's parameters and work, layer by layer, from its architecture (He et al., arXiv:1512.03385, table 1).

The variant is the one that PyTorch's torchvision and most published figures use: the stride of a downsampling block is
in its 3x3 convolution, and every convolution is followed by a batch normalization with a weight and a bias for each
channel. Images have 224 x 224 pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BLOCKS = (3, 4, 6, 3)  # of each stage
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # bytes: the buckets of PyTorch's DistributedDataParallel


@dataclass(frozen=True)
class Parameter:
    """A tensor of weights: its elements, and its multiplications in a forward pass over one image."""

    name: str
    elements: int
    work: int


def resnet50() -> tuple[Parameter, ...]:
    """The parameters in the order in which the forward pass uses them."""
    found: list[Parameter] = []

    def convolution(name: str, inputs: int, outputs: int, kernel: int, pixels: int) -> None:
        weights = inputs * outputs * kernel * kernel
        found.append(Parameter(f"{name}.weight", weights, weights * pixels * pixels))
        found.append(Parameter(f"{name}.norm.weight", outputs, 0))
        found.append(Parameter(f"{name}.norm.bias", outputs, 0))

    convolution("stem", 3, 64, 7, 112)
    inputs, pixels = 64, 56
    for stage, blocks in enumerate(BLOCKS):
        width = 64 << stage
        for block in range(blocks):
            name = f"stage{stage + 1}.{block}"
            before = pixels
            if stage > 0 and block == 0:
                pixels //= 2
            convolution(f"{name}.reduce", inputs, width, 1, before)
            convolution(f"{name}.spatial", width, width, 3, pixels)
            convolution(f"{name}.expand", width, 4 * width, 1, pixels)
            if block == 0:
                convolution(f"{name}.shortcut", inputs, 4 * width, 1, pixels)
            inputs = 4 * width
    found.append(Parameter("classifier.weight", inputs * 1000, inputs * 1000))
    found.append(Parameter("classifier.bias", 1000, 0))
    return tuple(found)


@dataclass(frozen=True)
class Bucket:
    """Gradients that are averaged together: bytes, and the share of the backward pass after which they are ready."""

    nbytes: int
    ready: float


def buckets(parameters: Sequence[Parameter]) -> tuple[Bucket, ...]:
    """The gradients in float32, in the order of the backward pass, cut as DistributedDataParallel cuts them.

    A bucket ends with the gradient that makes it reach its size: FIRST_BUCKET bytes for the first one, BUCKET for the
    others. The time of a layer in the backward pass is taken as proportional to its multiplications.
    """
    total = sum(one.work for one in parameters)
    made: list[Bucket] = []
    filled, done = 0, 0
    for one in reversed(parameters):
        done += one.work
        filled += one.elements * 4
        if filled >= (BUCKET if made else FIRST_BUCKET):
            made.append(Bucket(filled, done / total))
            filled = 0
    if filled:
        made.append(Bucket(filled, 1.0))
    return tuple(made)


def gradients() -> tuple[tuple[Bucket, ...], tuple[Bucket, ...]]:
    """ResNet-50's gradients in float32: in buckets, and as one bucket at the end of the backward pass."""
    parameters = resnet50()
    return buckets(parameters), (Bucket(4 * sum(one.elements for one in parameters), 1.0),)
