"""The model whose training step is measured: a ResNet of basic blocks for images of 32 x 32 pixels.

With its default width it is the ResNet-18 of He et al. (arXiv:1512.03385) with the stem that the paper takes for
CIFAR (section 4.2): a 3x3 convolution without pooling. 11.2 million parameters, 44.7 MB of gradients, most of them in
the last stage, whose gradients the backward pass makes first.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

PIXELS = 32  # of an image's side
STAGES, BLOCKS = 4, 2  # each stage halves the side and doubles the channels; blocks in each


class Block(nn.Module):
    """Two 3x3 convolutions around a shortcut, BatchNorm behind each."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = (
            nn.Identity()
            if inputs == outputs and stride == 1
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        )

    def forward(self, image: Tensor) -> Tensor:
        """(batch, inputs, height, width) to (batch, outputs, height / stride, width / stride)."""
        return functional.relu_(self.body(image) + self.shortcut(image))


class ResNet(nn.Module):
    """Four stages of two blocks, the first `width` channels wide, and a linear layer for `classes` classes."""

    def __init__(self, width: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True))
        blocks: list[nn.Module] = []
        inputs = width
        for stage in range(STAGES):
            for block in range(BLOCKS):
                outputs = width << stage
                blocks.append(Block(inputs, outputs, 2 if stage and not block else 1))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)

    def forward(self, image: Tensor) -> Tensor:
        """(batch, 3, height, width) to (batch, classes)."""
        out: Tensor = self.head(self.blocks(self.stem(image)).mean((2, 3)))
        return out
