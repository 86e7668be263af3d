"""A fault under torch.distributed: prints what each surviving rank is told, and after how many seconds."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

fault = sys.argv[1]
dist.init_process_group("ddl", timeout=timedelta(seconds=3 if fault in ("late", "silent") else 60))
RANK, SIZE = dist.get_rank(), dist.get_world_size()
pair = dist.new_group([0, 1], timeout=timedelta(seconds=2))


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


def step() -> None:
    net = DistributedDataParallel(nn.Sequential(nn.Linear(50, 50), nn.Linear(50, 50)), bucket_cap_mb=0.001)
    net(Breaks.apply(torch.ones(4, 50, requires_grad=True))).sum().backward()
    middle = nn.Linear(50, 50)
    net = DistributedDataParallel(middle)
    Breaks.apply(net(torch.ones(4, 50))).sum().backward()


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
    if fault == "silent" and RANK == 0:
        dist.recv(tensor, 1)
    if fault == "silent" and RANK == 1:
        time.sleep(8)
    if fault == "short" and RANK < 2:
        dist.recv(tensor, 1) if RANK == 0 else dist.send(tensor[:3], 0)
    if fault == "another block":
        blocks = [torch.zeros(4) for _ in range(SIZE)] if RANK == 0 else None
        dist.gather(torch.zeros(3 if RANK == 1 else 4), blocks)
    if fault == "waited for" and RANK == 0:
        work = dist.irecv(tensor, 1)
        work.wait(timedelta(seconds=1))


start = time.monotonic()
try:
    run()
except Exception as error:
    print(f"rank {RANK} after {time.monotonic() - start:.1f} s: {type(error).__name__}: {error}", flush=True)
    sys.stdout.flush()
    os._exit(1)
