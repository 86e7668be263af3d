"""A training whose batches have random shapes: `random_shapes.py STEPS SEED SWAP`; plain if SWAP is "nothing".

Prints what the process holds now and then. Each line is a JSON object: the step, resident bytes, open files, threads,
Python's objects, and bytes of the slab file and of all copies out.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import threading
import warnings
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional

from lms.memory.resident import ResidentSet
from lms.torch.session import Session

WIDTH = 96
LINES = 50  # that are printed


class Net(nn.Module):
    """Convolution, attention and dense layers, the number of which is drawn for each step."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Conv1d(4, WIDTH, 3, padding=1)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, batch_first=True) for _ in range(3))
        self.out = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        x = functional.relu(self.inward(x)).transpose(1, 2)
        for block in self.blocks[:depth]:
            x = block(x)
        out: torch.Tensor = self.out(x)
        return out


def main(steps: int, seed: int, swap: str) -> None:
    """Train."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    rng = random.Random(seed)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    resident = ResidentSet()
    session = Session(model, optimizer, budget=1 << 20, min_size=1 << 12, swap=swap) if swap != "nothing" else None
    with session or nullcontext():
        for step in range(1, steps + 1):
            batch, length = rng.randint(1, 12), int(2 ** rng.uniform(0, 6))
            optimizer.zero_grad()
            model(torch.randn(batch, 4, length), rng.randint(0, 3)).square().mean().backward()
            optimizer.step()
            if step % max(steps // LINES, 1) == 0:
                gc.collect()
                found: dict[str, object] = {
                    "step": step,
                    "resident": resident.current(),
                    "files": len(os.listdir("/proc/self/fd")),
                    "threads": threading.active_count(),
                    "objects": len(gc.get_objects()),
                }
                if session is not None:
                    found["file"] = os.fstat(session.engine.file.fileno()).st_size  # type: ignore[attr-defined]
                    found["swapped"] = session.stats()["swapped_out"]
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
