"""The models that are measured, each with one fixed batch: a ResNet, a GPT with long sequences, a 3D U-Net.

On a CPU each saves 550 to 680 MB for its backward and takes 2 to 4 s a step on two cores.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

UNET = Path(__file__).parents[2] / "examples" / "brain_mri" / "net.py"


@dataclass
class Job:
    """A model, the loss of its one batch, and the kinds of module that checkpointing would wrap."""

    model: nn.Module
    loss: Callable[[], Tensor]
    blocks: tuple[type[nn.Module], ...]


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions around a shortcut (He et al. 2016), BatchNorm behind each, ReLU in place."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = (
            nn.Identity()
            if inputs == outputs and stride == 1
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        )

    def forward(self, image: Tensor) -> Tensor:
        """(batch, inputs, height, width) to (batch, 4 * width, height / stride, width / stride)."""
        return functional.relu_(self.body(image) + self.shortcut(image))


class ResNet(nn.Module):
    """A ResNet of bottleneck blocks: `depths` blocks in each stage, the first stage `width` channels wide."""

    def __init__(self, depths: tuple[int, ...], width: int, classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        stages: list[nn.Module] = []
        channels = width
        for stage, depth in enumerate(depths):
            for block in range(depth):
                stages.append(Bottleneck(channels, width << stage, 2 if stage > 0 and block == 0 else 1))
                channels = 4 * (width << stage)
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, classes)

    def forward(self, image: Tensor) -> Tensor:
        """(batch, 3, height, width) to (batch, classes)."""
        return self.head(self.stages(self.stem(image)).mean((2, 3)))  # type: ignore[no-any-return]


class Layer(nn.Module):
    """One transformer layer: LayerNorm before causal attention and before a GELU perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_perceptron = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same."""
        batch, length, width = x.shape
        heads = self.qkv(self.before_attention(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind()
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.perceptron(self.before_perceptron(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A GPT without dropout; the embedding is also the head's weight."""

    def __init__(self, vocabulary: int, length: int, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.words.weight
        nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) tokens to (batch, length, vocabulary) logits."""
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        return self.head(self.norm(self.layers(x)))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Size:
    """How large the three models are."""

    resnet: tuple[int, tuple[int, int], int, tuple[int, ...]]  # batch, sides, width, blocks a stage
    gpt: tuple[int, int, int, int, int, int]  # batch, length, vocabulary, width, heads, depth
    unet: tuple[int, tuple[int, int, int]]  # width, volume


SIZES = {
    "quick": Size((4, (64, 64), 16, (1, 1)), (2, 256, 128, 64, 2, 2), (4, (32, 32, 32))),
    # 550 to 680 MB saved.
    "cpu": Size((1, (704, 704), 64, (3, 3, 2, 1)), (1, 4096, 1024, 256, 4, 9), (8, (112, 128, 104))),
    # Some 5 GB saved, because every cell of the benchmark keeps its pinned host memory until the end.
    "cuda": Size((6, (704, 704), 64, (3, 4, 6, 3)), (2, 8192, 8192, 1024, 16, 5), (32, (144, 160, 128))),
}


def resnet(size: tuple[int, Sequence[int], int, tuple[int, ...]], device: torch.device) -> Job:
    """A ResNet: batch, sides, width, blocks a stage."""
    batch, sides, width, depths = size
    model = ResNet(depths, width).to(device)
    image, label = torch.randn(batch, 3, *sides).to(device), torch.randint(1000, (batch,)).to(device)
    return Job(model, lambda: functional.cross_entropy(model(image), label), (Bottleneck,))


def gpt(size: tuple[int, int, int, int, int, int], device: torch.device, dtype: torch.dtype | None = None) -> Job:
    """A GPT: batch, length, vocabulary, width, heads, depth."""
    batch, length, vocabulary, width, heads, depth = size
    model = GPT(vocabulary, length, width, heads, depth).to(device, dtype)
    tokens = torch.randint(vocabulary, (batch, length + 1)).to(device)

    def loss() -> Tensor:
        return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return Job(model, loss, (Layer,))


def unet(size: tuple[int, Sequence[int]], device: torch.device, batch: int = 1) -> Job:
    """A 3D U-Net: width, volume."""
    # The example's net on a volume of about the size that 2 mm voxels give; noise does as well here as a brain.
    spec = importlib.util.spec_from_file_location("brain_mri_net", UNET)
    assert spec is not None
    assert spec.loader is not None
    net = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(net)
    width, sides = size
    model: nn.Module = net.UNet3D(4, width=width).to(device)
    image, classes = torch.randn(batch, 1, *sides).to(device), torch.randint(4, (batch, *sides)).to(device)
    truth = functional.one_hot(classes, 4).movedim(-1, 1).float().contiguous()

    def loss() -> Tensor:
        # Not functional.cross_entropy: for volumes on a GPU it has no form that gives the same bits twice.
        return -(truth * functional.log_softmax(model(image), 1)).mean()

    return Job(model, loss, (nn.Sequential,))


BUILDERS: dict[str, Callable[[Size, torch.device], Job]] = {
    "resnet": lambda size, device: resnet(size.resnet, device),
    "gpt": lambda size, device: gpt(size.gpt, device),
    "unet": lambda size, device: unet(size.unet, device),
}


def build(name: str, size: str, device: torch.device) -> Job:
    """The job of that name and size, the same to the last bit in every process. Raises KeyError for an unknown one."""
    torch.manual_seed(20)
    return BUILDERS[name](SIZES[size], device)


def checkpoint_blocks(job: Job) -> None:
    """Wrap each of the job's blocks in torch.utils.checkpoint, as its user would."""
    for module in job.model.modules():
        if isinstance(module, job.blocks):
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
