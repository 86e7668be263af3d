"""Adds up over torchrun's ranks until there are two of them: torchrun ends and starts it again when an agent joins."""

import sys
import time

import torch
import torch.distributed as dist

import ddl.horovod.torch as hvd

hvd.init()
assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
hvd.shutdown()
dist.init_process_group("ddl")
while True:
    summed = torch.ones(1)
    dist.all_reduce(summed)
    assert summed.item() == dist.get_world_size()
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} ran\n", end="", flush=True)
    if dist.get_world_size() == 2:
        break
    time.sleep(0.1)
dist.destroy_process_group()
sys.exit()
