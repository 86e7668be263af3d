"""Adds 1 and 2 on two ranks, by the front end that is named."""

import sys


def with_numpy() -> tuple[int, int, float]:
    import numpy as np

    import ddl

    ddl.init()
    return ddl.rank(), ddl.size(), float(ddl.allreduce(np.array([ddl.rank() + 1.0]))[0])


def with_torch() -> tuple[int, int, float]:
    import torch
    import torch.distributed as dist

    import ddl.horovod.torch as hvd

    dist.init_process_group("ddl")
    summed = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(summed)
    dist.destroy_process_group()
    hvd.init()
    assert hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum) == summed
    return hvd.rank(), hvd.size(), summed.item()


rank, size, summed = {"numpy": with_numpy, "torch": with_torch}[sys.argv[1]]()
print(f"rank {rank} of {size}: {summed}", flush=True)
