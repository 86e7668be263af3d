"""A fault under torch.distributed: prints what each surviving rank is told, and after how many seconds."""

from __future__ import annotations

import atexit
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

fault = sys.argv[1]


def outlive_the_others() -> None:
    """The end of a rank ends the job, with ranks that have not said yet what they were told."""
    store.wait([f"told {rank}" for rank in range(SIZE) if rank != 1], timedelta(seconds=60))


if fault == "raises":
    atexit.register(outlive_the_others)  # before all others, and so called after all others
dist.init_process_group("ddl", timeout=timedelta(seconds=3 if fault in ("late", "silent") else 60))
RANK, SIZE = dist.get_rank(), dist.get_world_size()
store = dist.distributed_c10d._get_default_store()
pair = dist.new_group([0, 1], timeout=timedelta(seconds=60 if "destroyed" in fault else 2))


class Breaks(torch.autograd.Function):
    """Raises in its backward, on rank 1."""

    @staticmethod
    def forward(context, tensor):
        return tensor.clone()

    @staticmethod
    def backward(context, gradient):
        if RANK == 1 and fault == "raises":
            raise ValueError("this rank's own error")
        if RANK == 1 and fault == "dies":
            os._exit(9)
        return gradient


class Middle(nn.Module):
    """Between layers whose gradients are on their way and others that have none yet."""

    def forward(self, tensor):
        return Breaks.apply(tensor)


def step() -> None:
    net = nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50), Middle(), nn.Linear(50, 50))
    parallel = DistributedDataParallel(net, bucket_cap_mb=0.001)
    parallel(torch.ones(4, 50)).sum().backward()


def run() -> None:
    tensor = torch.zeros(4)
    if fault == "another call":
        dist.broadcast(tensor, 0) if RANK == 1 else dist.all_reduce(tensor)
    if fault == "another shape":
        dist.all_reduce(torch.zeros(5 if RANK == 1 else 4, 7))
    if fault == "another type":
        dist.all_reduce(tensor.double() if RANK == 1 else tensor)
    if fault in ("raises", "dies"):
        step()
    if fault == "another model":
        width = 5 if RANK == 1 else 4
        DistributedDataParallel(nn.Linear(width, 3))
    if fault == "late":
        if RANK == 1:
            time.sleep(8)
        dist.all_reduce(tensor)
    if fault == "late in a group" and RANK < 2:
        if RANK == 1:
            time.sleep(8)
        dist.all_reduce(tensor, group=pair)
    if fault in ("destroyed", "group destroyed") and RANK < 2:
        dist.all_reduce(tensor, group=pair)
        if RANK == 1:
            dist.destroy_process_group(pair if fault == "group destroyed" else None)
            time.sleep(8)
        else:
            dist.all_reduce(tensor, group=pair)
    if fault == "silent" and RANK == 0:
        dist.recv(tensor, 1)
    if fault == "silent" and RANK == 1:
        time.sleep(8)
    if fault == "short" and RANK < 2:
        dist.recv(tensor, 1) if RANK == 0 else dist.send(tensor[:3], 0)
    if fault == "another block":
        blocks = [torch.zeros(4) for _ in range(SIZE)] if RANK == 0 else None
        dist.gather(torch.zeros(3 if RANK == 1 else 4), blocks)
    if fault == "another part":  # torch.distributed has no reduce_scatter of unequal parts; each is reduced by itself
        own = torch.zeros(RANK + 1)
        dist.reduce_scatter(own, [torch.zeros(rank + 1 + (RANK == 1 and rank == 0)) for rank in range(SIZE)])
    if fault == "another root's part":
        dist.reduce(torch.zeros(5 if RANK == 1 else 4), 0)
    if fault == "another part of an alltoall":
        parts = [torch.zeros(5 if RANK == 1 and rank == 0 else 4) for rank in range(SIZE)]
        dist.all_to_all([torch.zeros(4) for _ in range(SIZE)], parts)
    if fault == "waited for" and RANK == 0:
        work = dist.irecv(tensor, 1)
        work.wait(timedelta(seconds=1))


start = time.monotonic()
try:
    run()
except Exception as error:
    if RANK == 1 and fault == "raises":
        raise  # and leaves as any program does
    print(f"rank {RANK} after {time.monotonic() - start:.1f} s: {type(error).__name__}: {error}", flush=True)
    if fault == "raises":
        store.set(f"told {RANK}", "")
        outlive_the_others()
    os._exit(1)
