"""Trains VGG16 plainly, and over LMS with a budget of a quarter of what it saves for backward; compares the bits.

    python frontends/caffe/bench/vgg16_swapped.py [--steps 2]

One image of 224 x 224, SGD with momentum. A first training with a budget of 0 tells how much is saved.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from typing import Any

import torch
from against_torch import vgg16

import lms
from bascule_caffe.optimizers import SGD


def train(steps: int, budget: int | None) -> tuple[list[float], str, dict[str, Any]]:
    """The losses, a digest of the blobs, and LMS's figures; without LMS if the budget is None."""
    torch.manual_seed(0)
    net, _ = vgg16(1)
    optimizer = SGD([entry.parameter for entry in net.learnable], lr=1e-4, momentum=0.9)
    image, label = torch.rand(1, 3, 224, 224), torch.zeros(1)
    losses: list[float] = []

    def run() -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            net(data=image, label=label)
            net.loss.backward()
            optimizer.step()
            losses.append(net.loss.item())

    stats: dict[str, Any] = {}
    if budget is None:
        run()
    else:
        with lms.LMS(net, optimizer, budget=budget, min_size=0) as session:
            run()
            stats = session.stats()
    digest = hashlib.sha256()
    for entry in net.learnable:
        digest.update(entry.parameter.detach().numpy().tobytes())
    return losses, digest.hexdigest(), stats


def main() -> int:
    """Prints what was saved, the budget and the losses; the exit status is 1 if a bit differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2)
    steps = parser.parse_args().steps
    losses, blobs, _ = train(steps, None)
    saved = train(steps, 0)[2]["saved"]
    swapped_losses, swapped_blobs, stats = train(steps, saved // 4)
    same = (losses, blobs) == (swapped_losses, swapped_blobs)
    moved = f"budget {stats['budget'] / 1e6:.1f} MB, {stats['swapped_in'] / 1e6:.1f} MB copied back"
    print(f"saved {saved / 1e6:.1f} MB, {moved}; losses {losses} and {swapped_losses}")
    print("the same bits" if same else "OTHER BITS")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
