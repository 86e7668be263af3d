r"""Train on handwritten digits while nodes come and go: torchrun starts it again, and it goes on from its checkpoint.

    torchrun --nnodes 1:2 --nproc-per-node 1 --max-restarts 100 --rdzv-backend c10d --rdzv-endpoint h0:29777 \
        --rdzv-id job --no-python lms run --budget 4MB examples/elastic/train.py --checkpoint /shared/digits.pt

The global batch is the same for any number of ranks: each rank takes its share, in pieces of at most --piece samples
whose gradients add up. Fewer ranks have larger shares; LMS holds what a piece saves for its backward pass.
"""

from __future__ import annotations

import argparse
import os
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


def net(width: int) -> nn.Sequential:
    """The model, the same on every rank."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(3)]
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), *layers, nn.Linear(width, 10))


def share_of(batch: int, samples: int, step: int, seed: int, rank: int, size: int) -> torch.Tensor:
    """Which samples a rank takes in a step: all ranks together `batch` of `samples`, the same for any `size`."""
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed * 1_000_003 + step))
    return order[:batch][rank::size]


def main() -> None:
    """Train for so many steps, from the checkpoint if there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="a file that every node sees")
    parser.add_argument("--every", type=int, default=5, help="steps between two checkpoints (5)")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=1024, help="samples of a step, of all ranks together (1024)")
    parser.add_argument("--piece", type=int, default=512, help="most samples in one forward and backward pass (512)")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0, help="of the order of the samples (0)")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step, to watch it (0)")
    parser.add_argument("--backend", default="ddl")
    asked = parser.parse_args()

    dist.init_process_group(asked.backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    model = DistributedDataParallel(net(asked.width))
    optimizer = torch.optim.SGD(model.parameters(), lr=asked.lr, momentum=0.9)
    first = 0
    if asked.checkpoint.exists():
        state = torch.load(asked.checkpoint)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    for step in range(first + 1, asked.steps + 1):
        mine = share_of(asked.batch, len(images), step, asked.seed, rank, size)
        pieces = mine.split(asked.piece)
        loss = torch.zeros(1)
        for piece in pieces:
            # The ranks meet in the last piece's backward pass.
            with model.no_sync() if piece is not pieces[-1] else nullcontext():
                # DDP takes the mean over the ranks: a sum over the share times size / batch gives the batch's mean.
                one = cross_entropy(model(images[piece]), labels[piece], reduction="sum") * size / asked.batch
                one.backward()
            loss += one.detach() / size
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step}: loss={loss.item():.6f}, {size} ranks x {len(pieces)} pieces", flush=True)
            if step % asked.every == 0 or step == asked.steps:
                aside = asked.checkpoint.with_suffix(".new")
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, aside)
                os.replace(aside, asked.checkpoint)
        time.sleep(asked.pause)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
