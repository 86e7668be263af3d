"""torch.distributed over ddl with tensors in a GPU's memory, late on their stream: a missing wait shows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

import bascule_ddl_torch
import ddl.horovod.torch as hvd

DELAY = 50_000_000  # cycles: some 25 to 50 ms

if "ddl" not in dist.Backend.backend_list:  # a bare source tree has no entry point that registers it
    bascule_ddl_torch.register()
dist.init_process_group("ddl")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
GPU = torch.device("cuda", RANK % torch.cuda.device_count())
torch.cuda.set_device(GPU)
TOTAL = sum(range(1, SIZE + 1))
checks = 0


def late(value: float, count: int = 5000, *, strided: bool = False) -> Tensor:
    """Elements that the current stream writes only after a delay; other numbers are there before."""
    memory = torch.full((count, 2), -1.0, device=GPU)
    tensor = memory[:, 0] if strided else memory.view(-1)[:count]
    torch.cuda.synchronize()
    torch.cuda._sleep(DELAY)
    tensor.fill_(value)
    return tensor


def same(tensor: Tensor, value: float, what: str) -> None:
    """By a kernel on the current stream, which nothing but the call's `wait` has ordered."""
    global checks
    checks += 1
    wrong = int((tensor != value).sum())
    assert wrong == 0, f"rank {RANK}: {what}: {wrong} of {tensor.numel()} are not {value}: {tensor.flatten()[:4]}"


def calls(*, strided: bool) -> None:
    mine = late(RANK + 1.0, strided=strided)
    dist.all_reduce(mine)
    same(mine, TOTAL, "all_reduce")
    mine = late(RANK + 1.0, strided=strided)
    work = dist.all_reduce(mine, async_op=True)
    work.wait()
    same(mine, TOTAL, "all_reduce, asynchronous")
    mine = late(RANK + 1.0, strided=strided)
    done = dist.all_reduce(mine, async_op=True).get_future().then(lambda its: its.value()[0] * 2)
    same(done.wait(), 2 * TOTAL, "a future's callback")
    mine = late(RANK + 1.0, strided=strided)
    dist.broadcast(mine, 0)
    same(mine, 1, "broadcast")
    mine = late(RANK + 1.0, strided=strided)
    every = late(-2, SIZE * mine.numel())
    dist.all_gather_into_tensor(every, mine)
    for rank in range(SIZE):
        same(every.view(SIZE, -1)[rank], rank + 1, "all_gather_into_tensor")
    listed = [late(-2, mine.numel(), strided=strided) for _ in range(SIZE)]
    dist.all_gather(listed, late(RANK + 1.0, strided=strided))
    for rank, its in enumerate(listed):
        same(its, rank + 1, "all_gather")
    part = late(-2, 100, strided=strided)
    dist.reduce_scatter_tensor(part, late(RANK + 1.0, SIZE * 100, strided=strided))
    same(part, TOTAL, "reduce_scatter_tensor")
    moved = late(-2, SIZE * 10, strided=strided)
    dist.all_to_all_single(moved, late(RANK + 1.0, SIZE * 10, strided=strided))
    for rank in range(SIZE):
        same(moved[10 * rank : 10 * rank + 10], rank + 1, "all_to_all_single")
    if SIZE > 1:
        got = late(-2, strided=strided)
        work = dist.irecv(got, (RANK - 1) % SIZE)
        dist.send(late(RANK + 1.0, strided=strided), (RANK + 1) % SIZE)
        work.wait()
        same(got, (RANK - 1) % SIZE + 1, "a message")


def horovods_names() -> None:
    same(hvd.allreduce(late(RANK + 1.0), op=hvd.Sum), TOTAL, "hvd.allreduce")
    every = hvd.allgather(late(RANK + 1.0))
    for rank in range(SIZE):
        same(every.view(SIZE, -1)[rank], rank + 1, "hvd.allgather")
    same(hvd.broadcast(late(RANK + 1.0), 0), 1, "hvd.broadcast")
    weight = torch.nn.Parameter(late(1.0))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), op=hvd.Sum)
    (weight * late(RANK + 1.0)).sum().backward()
    optimizer.step()
    same(weight.detach(), 1 - TOTAL, "a step of hvd.DistributedOptimizer")


def on(stream: torch.cuda.Stream | None, run: Callable[[], None]) -> None:
    with torch.cuda.stream(stream) if stream else contextlib.nullcontext():
        run()
    torch.cuda.synchronize()


for stream in (None, torch.cuda.Stream()):
    for strided in (False, True):
        on(stream, lambda strided=strided: calls(strided=strided))
hvd.init()
for stream in (None, torch.cuda.Stream()):
    on(stream, horovods_names)
hvd.shutdown()
dist.barrier()
dist.destroy_process_group()
print(f"rank {RANK}: {checks} checks")
