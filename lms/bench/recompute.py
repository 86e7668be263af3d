"""Measure keep, swap or recompute behind a slow disk: `python lms/bench/recompute.py gpt`. docs/benchmarks.md says how.

In each round each contestant trains in a process of its own: plain, checkpointed by hand (each block), and LMS with two
budgets, swapping alone or choosing modules to recompute. The disk is throttled for all (needs root).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from links import throttle
from models import GPT, Job, Layer, checkpoint_blocks
from torch import Tensor, nn
from torch.nn import functional

from lms.memory.machine import machine
from lms.memory.resident import ResidentSet
from lms.torch.session import Session
from lms.units import format_size

STEPS, LAST = 12, 4  # of which the last ones count: the first ones measure and choose
SHARES = (0.35, 0.0)  # of the saved bytes, that may stay


class Block(nn.Module):
    """A residual block with BatchNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, image: Tensor) -> Tensor:
        """(batch, width, height, width) to the same."""
        return functional.relu_(self.body(image) + image)


def gpt() -> Job:
    """6 layers of 256 on a sequence of 1,024."""
    model = GPT(vocabulary=1024, length=1024, width=256, heads=4, depth=6)
    tokens = torch.randint(1024, (1, 1025))

    def loss() -> Tensor:
        return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return Job(model, loss, (Layer,))


def resnet() -> Job:
    """Two stages of 4 residual blocks on 3 images of 128 x 128."""
    first, second = (nn.Sequential(*(Block(width) for _ in range(4))) for width in (32, 64))
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), first, nn.Conv2d(32, 64, 2, 2), second, nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(64, 10),
    )  # fmt: skip
    images, labels = torch.randn(3, 3, 128, 128), torch.randint(10, (3,))
    return Job(model, lambda: functional.cross_entropy(model(images), labels), (Block,))


Found = dict[str, Any]  # what a cell prints
MODELS: dict[str, Callable[[], Job]] = {"gpt": gpt, "resnet": resnet}


def cell(model: str, kind: str, budget: int, folder: str) -> None:
    """Train, and print what it took as JSON."""
    torch.manual_seed(20)
    job = MODELS[model]()
    if kind == "checkpoint":
        checkpoint_blocks(job)
    optimizer = torch.optim.SGD(job.model.parameters(), lr=1e-3, momentum=0.9)
    session = None
    if kind in ("swap", "three-way", "all kept"):
        session = Session(job.model, optimizer, budget=budget, spill_dir=folder, recompute=kind == "three-way").open()
    times, losses, resident = [], [], ResidentSet()
    for index in range(STEPS):
        if index == STEPS - LAST:
            resident.reset_peak()
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = job.loss()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.item()).hex())
        times.append(time.perf_counter() - began)
    found: Found = {"seconds": statistics.median(times[-LAST:]), "peak": resident.peak(), "losses": losses}
    if session is not None:
        stats, plan = session.stats(), session.plan
        found |= {"saved": stats["saved"], "held": stats["held_peak"], "out": plan.forecast.out if plan else 0}
        choice = plan.choice if plan is not None else None
        found |= {"foreseen": plan.forecast.seconds if plan else 0, "why": choice.why if choice else ""}
        found |= {"modules": list(choice.modules) if choice else [], "recomputed": choice.recomputed if choice else 0}
        session.close()
    print(json.dumps(found))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--rate", type=float, default=200e6, help="bytes a second, each way (default 200e6)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default 3)")
    parser.add_argument("--cell", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.cell is not None:
        cell(given.model, given.cell[0], int(given.cell[1]), given.cell[2])
        return 0
    if (refused := throttle.refused()) is not None:
        parser.error(refused)
    rows: dict[tuple[str, float], list[Found]] = {}
    with throttle.disk(1 << 30) as (folder, number), throttle.throttled(number, given.rate) as prefix:

        def run(kind: str, budget: int) -> Found:
            command = [sys.executable, __file__, given.model, "--cell", kind, str(budget), str(folder)]
            done = subprocess.run([*prefix, *command], check=True, stdout=subprocess.PIPE, text=True)
            return cast("Found", json.loads(done.stdout.splitlines()[-1]))

        saved = run("all kept", 1 << 60)["saved"]
        lms = [(kind, share) for share in SHARES for kind in ("swap", "three-way")]
        for _ in range(given.rounds):
            for kind, share in (("plain", 1.0), ("checkpoint", 1.0), *lms):
                rows.setdefault((kind, share), []).append(run(kind, int(share * saved)))
    plain = rows["plain", 1.0]
    print(f"{given.model}: {format_size(saved)} saved; {given.rate / 1e6:.0f} MB/s; {machine()}")
    for (kind, share), found in rows.items():
        ratio = statistics.median(one["seconds"] / base["seconds"] for one, base in zip(found, plain, strict=True))
        seconds = [one["seconds"] for one in found]
        peak = statistics.median(one["peak"] for one in found)
        same = all(one["losses"] == plain[0]["losses"] for one in found)
        times = f"{min(seconds):.2f} to {max(seconds):.2f} s, {ratio:.2f} x plain"
        print(f"{kind:<10} {share:4.0%} {times}, peak {format_size(peak)}, losses {'equal' if same else 'DIFFER'}")
        for one in found if "out" in found[0] else ():
            moved = f"{format_size(one['out'])} out, at most {format_size(one['held'])} held"
            modules = f"{format_size(one['recomputed'])} at once; {one['why']} {', '.join(one['modules'])}"
            print(f"    foreseen {one['foreseen']:.2f} s a pass, {moved}, {modules}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
