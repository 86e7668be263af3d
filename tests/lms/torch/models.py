"""Small models of known shapes, and a training step around any of them.

A folder of tests is no package, so the tests get this module as the fixture `models` (tests/lms/conftest.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


def trained(
    model: nn.Module, loss_of: Callable[[int], Tensor], optimizer: torch.optim.Optimizer | None = None
) -> Callable[[int], list[Tensor]]:
    """A step that goes backward, shows loss and gradients, and moves the parameters."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), 1e-3)

    def step(index: int) -> list[Tensor]:
        optimizer.zero_grad()
        loss = loss_of(index)
        loss.backward()
        shown = [loss, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        return shown

    return step


def mlp(width: int = 16) -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, width),
        nn.GELU(),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 4),
    )


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.two = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.two(self.relu(self.norm1(self.one(x)))))
        out += x
        return self.relu(out)


def resnet(width: int = 8) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        Residual(width),
        nn.MaxPool2d(2),
        Residual(width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 5),
    )


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, width: int = 16, layers: int = 2, words: int = 32) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Parameter(torch.randn(64, width) * 0.02)
        self.blocks = nn.ModuleList(Attention(width, 2) for _ in range(layers))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
        self.checkpointed: bool | None = None  # use_reentrant, or None for no checkpoints

    def forward(self, x: Tensor) -> Tensor:
        h = functional.dropout(self.words(x) + self.places[: x.shape[1]], 0.1)
        for block in self.blocks:
            h = block(h) if self.checkpointed is None else checkpoint(block, h, use_reentrant=self.checkpointed)
        return self.head(h)

    def loss(self, x: Tensor) -> Tensor:
        return functional.cross_entropy(self(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


class UNet(nn.Module):
    """Two levels in three dimensions, with a skip connection."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.down = self.stage(1, width)
        self.deep = self.stage(width, 2 * width)
        self.up = nn.ConvTranspose3d(2 * width, width, 2, stride=2)
        self.last = self.stage(2 * width, width)
        self.head = nn.Conv3d(width, 3, 1)

    @staticmethod
    def stage(inner: int, outer: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv3d(inner, outer, 3, padding=1), nn.InstanceNorm3d(outer, affine=True), nn.ReLU(True)
        )

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        up = self.up(self.deep(functional.max_pool3d(skip, 2)))
        return self.head(self.last(torch.cat([skip, up], 1)))
