"""The 3D U-Net of Cicek, Abdulkadir, Lienkamp, Brox and Ronneberger (MICCAI 2016, arXiv:1606.06650).

Two things differ from the paper. Its batch normalisation is instance normalisation here: the batch is one volume, so
batch statistics would be that volume's statistics in training and something else in evaluation. And an up-convolution
halves its channels, as in the 2D U-Net (Ronneberger et al. 2015).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class UNet3D(nn.Module):
    """Image (batch, 1, x, y, z) to logits (batch, classes, x, y, z).

    `width` is the number of channels at full resolution, doubled at each of the `depth` poolings. Each side of the
    image must be a multiple of `multiple`, 2 to the power of `depth`; forward raises ValueError otherwise.
    """

    def __init__(self, classes: int, width: int = 16, depth: int = 3) -> None:
        super().__init__()
        if width < 2 or width % 2:
            raise ValueError(f"width={width}: expected an even number, 2 or more")
        if depth < 1:
            raise ValueError(f"depth={depth}: expected 1 or more")
        self.multiple = 2**depth
        widths = [width * 2**level for level in range(depth + 1)]
        self.encoder = nn.ModuleList(_Encoder(*pair) for pair in zip([1, *widths], widths, strict=False))
        self.decoder = nn.ModuleList(_Decoder(channels) for channels in reversed(widths[:-1]))
        self.head = nn.Conv3d(width, classes, kernel_size=1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Logits of each class for each voxel."""
        if any(side % self.multiple for side in image.shape[2:]):
            raise ValueError(f"image of {tuple(image.shape[2:])} voxels: expected multiples of {self.multiple}")
        skips: list[torch.Tensor] = []
        features = image
        for level, encode in enumerate(self.encoder):
            if level:
                features = functional.max_pool3d(features, kernel_size=2)
            features = encode(features)
            skips.append(features)
        skips.pop()  # the lowest level goes straight up
        for decode in self.decoder:
            features = decode(features, skips.pop())
        logits: torch.Tensor = self.head(features)
        return logits


class _Encoder(nn.Sequential):
    """Two convolutions. Channels double before the pooling, as in the paper, so that no pooling is a bottleneck."""

    def __init__(self, inputs: int, outputs: int) -> None:
        middle = outputs // 2
        super().__init__(
            _convolution(inputs, middle), *_normalised(middle), _convolution(middle, outputs), *_normalised(outputs)
        )


class _Decoder(nn.Module):
    """Up-convolution, concatenation with the encoder's features of that level, two convolutions.

    A convolution of a concatenation is the sum of the convolutions of its parts. Written as that sum, it needs no copy
    of both parts in one tensor, which would be the largest tensor of all.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.upwards = nn.ConvTranspose3d(2 * channels, channels, kernel_size=2, stride=2)
        self.of_below = _convolution(channels, channels)
        self.of_skip = _convolution(channels, channels)
        self.rest = nn.Sequential(*_normalised(channels), _convolution(channels, channels), *_normalised(channels))

    def forward(self, below: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        """Features of this level, from those of the level below and the encoder's."""
        features: torch.Tensor = self.rest(self.of_below(self.upwards(below)).add_(self.of_skip(skip)))
        return features


def _convolution(inputs: int, outputs: int) -> nn.Conv3d:
    # Without a bias: the normalisation that follows would take it out again.
    return nn.Conv3d(inputs, outputs, kernel_size=3, padding=1, bias=False)


def _normalised(channels: int) -> tuple[nn.Module, nn.Module]:
    # The backward of the normalisation reads its input, so ReLU may overwrite its output.
    return nn.InstanceNorm3d(channels, affine=True), nn.ReLU(inplace=True)
