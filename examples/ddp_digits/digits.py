"""What both scripts train: a small net on scikit-learn's handwritten digits, and what is checked afterwards."""

from __future__ import annotations

import argparse
import hashlib

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

TRAIN, SEED = 1500, 0
Batches = DataLoader[tuple[Tensor, ...]]


def parser_of(description: str) -> argparse.ArgumentParser:
    """--epochs, --batch and --lr."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=60, help="images a step, over all ranks")
    parser.add_argument("--lr", type=float, default=0.1)
    return parser


def data() -> tuple[TensorDataset, TensorDataset]:
    """1,500 images to train with, 297 to test with; of shape (1, 8, 8), with labels from 0 to 9."""
    images, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    targets = torch.tensor(labels)
    return TensorDataset(inputs[:TRAIN], targets[:TRAIN]), TensorDataset(inputs[TRAIN:], targets[TRAIN:])


def net(seed: int = SEED) -> nn.Module:
    """A layer of convolutions and one of a perceptron."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10))


def batches(dataset: TensorDataset, batch: int, rank: int, size: int) -> tuple[Batches, DistributedSampler[int]]:
    """This rank's share of each batch of `batch` images; its sampler wants the number of the epoch."""
    if batch % size != 0:
        raise SystemExit(f"--batch {batch} must be a multiple of the {size} ranks, which share it evenly")
    sampler: DistributedSampler[int] = DistributedSampler(
        dataset, num_replicas=size, rank=rank, seed=SEED, drop_last=True
    )
    return DataLoader(dataset, batch // size, sampler=sampler, drop_last=True), sampler


def epoch(model: nn.Module, optimizer: torch.optim.Optimizer, share: Batches) -> Tensor:
    """Train on every batch; the mean loss over this rank's images."""
    losses = []
    for inputs, targets in share:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


def alone(epochs: int, batch: int, lr: float) -> list[float]:
    """The losses of one process with the whole batches."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    share, sampler = batches(data()[0], batch, 0, 1)
    losses = []
    for number in range(epochs):
        sampler.set_epoch(number)
        losses.append(float(epoch(model, optimizer, share)))
    return losses


def accuracy(model: nn.Module) -> float:
    """The share of the test images that it names rightly."""
    inputs, targets = data()[1].tensors
    with torch.no_grad():
        return float((model(inputs).argmax(1) == targets).float().mean())


def fingerprint(model: nn.Module) -> str:
    """Of all bits of the parameters."""
    content = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    return hashlib.sha256(content).hexdigest()


def report(size: int, losses: list[float], model: nn.Module, prints: list[str], options: argparse.Namespace) -> None:
    """Print how it went, beside one process on the whole batches."""
    others = alone(options.epochs, options.batch, options.lr)[-len(losses) :]
    apart = max((abs(one - other) / other for one, other in zip(losses, others, strict=True)), default=0)
    print(f"{size} ranks: loss {losses[0]:.6f} -> {losses[-1]:.6f}, {accuracy(model):.1%} of the test images right")
    print(f"the same in one process: loss {others[0]:.6f} -> {others[-1]:.6f}, at most {apart:.1e} of it apart")
    print(f"parameters: {'the same bits on every rank' if len(set(prints)) == 1 else 'DIFFERENT on some ranks'}")
