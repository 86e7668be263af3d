"""A rank whose training steps are timed: one model for each contestant, in one process; their steps take turns.

    ddlrun -np 4 python ddl/bench/trainee.py --json FILE

A contestant is a backend, perhaps with DistributedDataParallel's `bucket_cap_mb`: `ddl`, `gloo`, `ddl:5`. One more,
ALONE, takes the same step under `no_sync`, without communication. First each contestant takes steps whose losses are
compared; then all are timed, in rounds. Rank 0 writes the results.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from resnet import PIXELS, ResNet
from steps import ALONE, DDL, Steps
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddl.bench.contest import order

CLASSES = 10
CHECKED = 4  # steps whose losses are compared


class Trainee:
    """A contestant's model, data and optimizer on this rank. All begin with the same bits."""

    def __init__(self, name: str, batch: int, width: int) -> None:
        self.name = name
        backend, _, cap = name.partition(":")
        torch.manual_seed(0)
        group = None if backend in (DDL, ALONE) else dist.new_group(backend=backend)
        self.model = DistributedDataParallel(
            ResNet(width, CLASSES), process_group=group, bucket_cap_mb=float(cap) if cap else None
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.005, momentum=0.9)
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        self.images = torch.randn(batch, 3, PIXELS, PIXELS, generator=generator)
        self.targets = torch.randint(0, CLASSES, (batch,), generator=generator)

    def step(self) -> Tensor:
        """One step of training; this rank's loss."""
        self.optimizer.zero_grad()
        with self.model.no_sync() if self.name == ALONE else nullcontext():
            loss = nn.functional.cross_entropy(self.model(self.images), self.targets)
            loss.backward()
        self.optimizer.step()
        return loss.detach()

    def check(self, steps: int) -> list[float]:
        """Take `steps` steps; returns the mean loss over all ranks for each."""
        losses = torch.stack([self.step() for _ in range(steps)])
        dist.all_reduce(losses, dist.ReduceOp.AVG)
        return [float(loss) for loss in losses]

    def has_the_same_bits_everywhere(self) -> bool:
        """Whether all ranks have the same parameters."""
        content = b"".join(parameter.detach().numpy().tobytes() for parameter in self.model.parameters())
        prints: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(prints, hashlib.sha256(content).hexdigest())
        return len(set(prints)) == 1

    def buckets(self) -> list[int]:
        """Bytes of each bucket, after some training."""
        said = self.model._get_ddp_logging_data()
        return [int(size) for size in str(said.get("rebuilt_bucket_sizes", "")).split(",") if size.strip()]


def timed(work: Callable[[], object]) -> float:
    """Seconds on the slowest rank, after a barrier."""
    dist.barrier()
    start = time.perf_counter()
    work()
    took = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def train(names: Sequence[str], batch: int, width: int, rounds: int) -> list[Steps]:
    """Train with each of `names`, in turns, in a different order each round, as `ddlrun bench` does."""
    trainees = [Trainee(name, batch, width) for name in names]
    losses = [one.check(CHECKED) for one in trainees]
    same = [one.has_the_same_bits_everywhere() for one in trainees]
    seconds: list[list[float]] = [[] for _ in trainees]
    for at in range(rounds):
        for place in order(len(trainees), at):
            seconds[place].append(timed(trainees[place].step))
    return [
        Steps(one.name, its_losses, its_bits, one.buckets(), its_seconds)
        for one, its_losses, its_bits, its_seconds in zip(trainees, losses, same, seconds, strict=True)
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="time training steps over several backends of torch.distributed")
    parser.add_argument("--contestants", default="ddl,gloo", metavar="NAME[:MB],...")
    parser.add_argument("--batch", type=int, default=4, help="images a rank and step")
    parser.add_argument("--width", type=int, default=64, help="channels of the first stage")
    parser.add_argument("--rounds", type=int, default=6, help="steps of each that are timed")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the hosts of a virtual cluster share the processors
    dist.init_process_group("ddl")
    steps = train([*args.contestants.split(","), ALONE], args.batch, args.width, args.rounds)
    if dist.get_rank() == 0:
        parameters = [parameter.numel() for parameter in ResNet(args.width, CLASSES).parameters()]
        record = {
            "ranks": dist.get_world_size(),
            "batch": args.batch,
            "parameters": sum(parameters),
            "bytes": 4 * sum(parameters),
            "torch": torch.__version__,
            "steps": [asdict(one) for one in steps],
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
