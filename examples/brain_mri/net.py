"""The 3D U-Net of Cicek, Abdulkadir, Lienkamp, Brox and Ronneberger (MICCAI 2016, arXiv:1606.06650).

Two things differ from the paper. Its batch normalisation is instance normalisation here: the batch is one volume, so
batch statistics would be that volume's statistics in training and something else in evaluation. And an up-convolution
halves its channels, as in the 2D U-Net (Ronneberger et al. 2015), which keeps the widest tensor, the concatenation at
full resolution, a third smaller.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


def _convolution(inputs: int, outputs: int) -> list[nn.Module]:
    """Convolution, normalisation, ReLU. The convolution has no bias: the normalisation would take it out."""
    return [
        nn.Conv3d(inputs, outputs, kernel_size=3, padding=1, bias=False),
        nn.InstanceNorm3d(outputs, affine=True),
        nn.ReLU(inplace=True),  # the backward of the normalisation reads its input, so its output may be overwritten
    ]


class UNet3D(nn.Module):
    """Image (batch, 1, x, y, z) to logits (batch, classes, x, y, z).

    `width` is the number of channels at full resolution, doubled at each of the `depth` poolings. Each side of the
    image must be a multiple of `multiple`, 2 to the power of `depth`; forward raises ValueError otherwise.
    """

    def __init__(self, classes: int, width: int = 12, depth: int = 3) -> None:
        super().__init__()
        if width < 2 or width % 2:
            raise ValueError(f"width={width}: expected an even number, 2 or more")
        if depth < 1:
            raise ValueError(f"depth={depth}: expected 1 or more")
        self.multiple = 2**depth
        widths = [width * 2**level for level in range(depth + 1)]
        # Channels double before the pooling, as the paper has it, so that no pooling is a bottleneck.
        self.encoder = nn.ModuleList(
            nn.Sequential(*_convolution(inputs, outputs // 2), *_convolution(outputs // 2, outputs))
            for inputs, outputs in zip([1, *widths], widths, strict=False)
        )
        self.upwards = nn.ModuleList(
            nn.ConvTranspose3d(2 * outputs, outputs, kernel_size=2, stride=2) for outputs in reversed(widths[:-1])
        )
        self.decoder = nn.ModuleList(
            nn.Sequential(*_convolution(2 * outputs, outputs), *_convolution(outputs, outputs))
            for outputs in reversed(widths[:-1])
        )
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
        for raise_, decode in zip(self.upwards, self.decoder, strict=True):
            features = decode(torch.cat((skips.pop(), raise_(features)), dim=1))
        logits: torch.Tensor = self.head(features)
        return logits
