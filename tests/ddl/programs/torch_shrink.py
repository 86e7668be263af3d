"""Allreduces of torch.distributed, in which rank 1 dies; `dist.shrink_group` makes the others a group again.

Argument: `told`, if the script knows who dies; `asks` ddl.shrink; `wrong` names another.
"""

import os
import sys

import torch
import torch.distributed as dist

import ddl

dist.init_process_group("ddl")
who = dist.get_rank()
part = dist.new_group([0, 2])  # destroyed with the first epoch
try:
    for step in range(20):
        if step == 7 and who == 1:
            os.kill(os.getpid(), 9)
        dist.all_reduce(torch.ones(1000))
except ddl.PeerLostError:
    pass
else:
    raise AssertionError("nobody died")
gone = {"told": [1], "wrong": [2 if who == 0 else 0]}.get(sys.argv[1]) or list(ddl.shrink().gone)
try:
    group = dist.shrink_group(gone)
except ddl.ArgumentError as error:
    print(f"ArgumentError: {error}", flush=True)
    sys.exit()
assert group is dist.group.WORLD
assert (dist.get_rank(), dist.get_world_size()) == (who // 2, 2)
data = torch.arange(5, dtype=torch.float64) + 10 * who
dist.all_reduce(data)
assert data.tolist() == [20, 22, 24, 26, 28], data
gathered: list[object] = [None, None]
dist.all_gather_object(gathered, who)
assert gathered == [0, 2], gathered
half = dist.new_group([1])
if dist.get_rank() == 1:
    dist.all_reduce(data, group=half)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
model(torch.full((2, 3), float(who))).sum().backward()
weight = model.module.weight.grad
assert weight is not None
assert weight.tolist() == [[2.0, 2.0, 2.0]], weight  # the mean of 0 and 4
dist.destroy_process_group()
assert not ddl.is_initialized()
print(f"{who}: right", flush=True)
