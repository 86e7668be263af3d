"""One contestant of the bookkeeping benchmark: a process that trains a model of many small operations.

It is started with a JSON configuration and says how many tensors autograd saves in a step. Each line of its input gets
one line of JSON back: the processor time of the forward and of the backward, the means over some steps. It needs no
more of LMS than its public names, so that it can measure another tree's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

WARM = 12  # steps. LMS records in the first ones, and measures the device's memory up to the sixth.
STEPS = 10  # of one answer. Their mean, not their median: the collector's full runs come in few steps, and count.
MIN_SIZE = 4096  # bytes, so that computing on a storage of that size takes little time


class Relu(nn.Module):
    """Saves its result: one tensor with a storage of its own."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape, to the same."""
        return torch.relu(x)


def saves(operations: int) -> tuple[nn.Module, Tensor]:
    """All that is saved could move: each operation saves one new storage of MIN_SIZE."""
    return blocks([Relu() for _ in range(operations)]), torch.rand(MIN_SIZE // 4, requires_grad=True)


def stays(operations: int) -> tuple[nn.Module, Tensor]:
    """Nothing that is saved can move: each operation saves a parameter, and a tensor that is small."""
    side = 64
    return blocks([nn.Linear(side, side, bias=False) for _ in range(operations // 2)]), torch.rand(1, side)


def blocks(operations: list[nn.Module]) -> nn.Module:
    """Operations as they stand in models: modules, some in each block."""
    return nn.Sequential(*(nn.Sequential(*operations[at : at + 4]) for at in range(0, len(operations), 4)))


MODELS = {"saves": saves, "stays": stays, "moves": saves}
SHARE = 0.9  # of the bytes that "moves" saves may stay


def identity() -> AbstractContextManager[object]:
    """Hooks that do nothing: no saved-tensor hooks in Python can be cheaper."""
    return saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def managed(model: nn.Module, budget: int | None = None) -> AbstractContextManager[object]:
    """LMS with room for so many bytes; by default for everything."""
    from lms import Session

    return Session(model, min_size=MIN_SIZE, budget=budget)


def step(model: nn.Module, x: Tensor) -> tuple[float, float]:
    """Seconds of this thread in the forward and in the backward. At its end nothing is saved any more."""
    start = time.thread_time()
    loss = model(x).sum()
    between = time.thread_time()
    loss.backward()
    del loss
    end = time.thread_time()
    model.zero_grad()
    x.grad = None
    return between - start, end - between


def count(model: nn.Module, x: Tensor) -> int:
    """Tensors that autograd saves in a step."""
    found: list[None] = []

    def pack(tensor: Tensor) -> Tensor:
        found.append(None)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        step(model, x)
    return len(found)


def main() -> None:
    """Answer commands until the input ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    config = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.manual_seed(20)
    model, x = MODELS[config["model"]](config["operations"])
    budget = int(SHARE * config["operations"] * MIN_SIZE) if config["model"] == "moves" else None
    saved = count(model, x)
    kinds: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "plain": nullcontext,
        "identity": identity,
        "lms": lambda: managed(model, budget),
    }
    with kinds[config["kind"]]():
        for _ in range(WARM):
            step(model, x)
        print(json.dumps({"saved": saved}), file=answers)
        for _ in sys.stdin:
            forward, backward = zip(*(step(model, x) for _ in range(STEPS)), strict=True)
            print(json.dumps({"forward": fmean(forward), "backward": fmean(backward)}), file=answers)


if __name__ == "__main__":
    main()
