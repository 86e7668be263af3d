"""Ranks that join at any time, over several process sets and an optimizer; the numbers follow from a seed.

Arguments: the seed, and how many rounds. Four ranks.
"""

from __future__ import annotations

import random
import sys
import time

import torch
from torch import Tensor

import ddl.horovod.torch as hvd

SEED, ROUNDS = int(sys.argv[1]), int(sys.argv[2])


def value(rank: int, step: int, count: int) -> Tensor:
    return torch.arange(count, dtype=torch.float64) + rank * 3 + step


def play(game: random.Random, own: random.Random, sets: list[hvd.ProcessSet]) -> None:
    """One round: the same calls on each rank, up to one of its own choice. `own`: what only this rank does."""
    rank, size = hvd.rank(), hvd.size()
    number = game.choice([0, 3, 8, 20])
    calls = [(game.choice([*sets, None]), game.randrange(1, 50)) for _ in range(number)]  # None: the optimizer
    made = [game.randrange(number + 1) for _ in range(size)]  # by each rank, before it joins
    weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    pending = []
    for step, (process_set, count) in enumerate(calls[: made[rank]]):
        if own.random() < 0.1:
            time.sleep(own.random() * 0.15)  # more and less than a rank takes to hear of another
        if process_set is None:
            optimizer.zero_grad()
            (weight.sum() * (rank + 1 + step)).backward()
            optimizer.step()
            average = sum(other + 1 + step for other in range(size) if made[other] > step) / size
            assert torch.allclose(weight.grad, torch.full_like(weight, average)), (step, weight.grad, average)
        elif process_set.included():
            total = sum(value(other, step, count) for other in process_set.ranks if made[other] > step)
            handle = hvd.allreduce_async(value(rank, step, count), op=hvd.Sum, process_set=process_set)
            pending.append((handle, total, step))
            if own.random() < 0.5:
                assert torch.equal(hvd.synchronize(handle), total), step
    last = hvd.join()
    if own.random() < 0.5:
        del optimizer
    for handle, total, step in pending:
        assert torch.equal(hvd.synchronize(handle), total), step
    assert set(hvd.allgather_object(last)) == {last}, "ranks differ about the last"
    shared = [sum(its in (None, hvd.global_process_set) for its, _ in calls[:count]) for count in made]
    assert shared[last] == max(shared), f"{last} was the last, but {shared} calls of all ranks were made"


for life in range(2):
    hvd.init()
    sets = [hvd.global_process_set, hvd.add_process_set([0, 1, 2]), hvd.add_process_set([1, 3])]
    for index in range(ROUNDS):
        seed = f"{SEED}, {life}, {index}"
        play(random.Random(seed), random.Random(f"{seed}, {hvd.rank()}"), sets)
    rank = hvd.rank()
    hvd.shutdown()
print(f"rank {rank}: all right", flush=True)
