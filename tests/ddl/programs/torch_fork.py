"""Forks under torch.distributed: data loaders' workers, and a child that calls. None is a rank, and the ranks go on."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ddl

torch.set_num_threads(1)
dist.init_process_group("ddl")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
DATA = TensorDataset(torch.arange(96.0).view(24, 4) / 96, torch.arange(24) % 3)


def losses(workers: int) -> list[float]:
    """Of two epochs: the second one's workers are forked while the threads that see to futures are there."""
    torch.manual_seed(0)
    net = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), bucket_cap_mb=0.0001)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    sampler = DistributedSampler(DATA, shuffle=False)
    context = "fork" if workers else None
    loader = DataLoader(DATA, 3, sampler=sampler, num_workers=workers, multiprocessing_context=context)
    found = []
    for _ in range(2):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(inputs), targets)
            loss.backward()
            optimizer.step()
            found.append(float(loss.detach()))
    return found


def is_refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except ddl.StateError as error:
        return "was forked by a rank" in str(error)
    return False


assert losses(2) == losses(0)

tensor = torch.ones(3)
work = dist.all_reduce(tensor, async_op=True)
seen = dist.all_reduce(torch.ones(1), async_op=True).get_future()  # by a thread that the child has not
child = os.fork()
if child == 0:
    calls = (
        lambda: dist.all_reduce(torch.ones(3)),
        lambda: dist.all_reduce(torch.ones(3), async_op=True).wait(),
        lambda: dist.all_reduce(torch.ones(6)[::2]),  # of Python's group in either
        lambda: dist.send(torch.ones(3), 1 - RANK),
        dist.barrier,
    )
    sys.exit(5 if all(map(is_refused, calls)) else 1)  # by Python's exit handlers
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 5, status
work.wait()
assert (tensor == SIZE).all()
assert seen.wait()[0] == SIZE
dist.barrier()
dist.destroy_process_group()
print(f"rank {RANK}: right", flush=True)
