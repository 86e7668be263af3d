"""The test of the recipe bascule-pytorch: three steps of DistributedDataParallel over DDL, to be run under `lms run`.

Rank 0 prints a checksum of all gradients, the mean over all ranks, to the last bit.
"""

import hashlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("ddl")
assert dist.get_world_size() == 2
torch.set_num_threads(1)  # the tests of other packages run beside it
torch.manual_seed(0)
layers: list[torch.nn.Module] = [torch.nn.Conv2d(1, 16, 3, padding=1)]
for _ in range(6):
    layers += [torch.nn.GELU(), torch.nn.Conv2d(16, 16, 3, padding=1)]
model = DistributedDataParallel(torch.nn.Sequential(*layers).double())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(1 + dist.get_rank())  # each rank has an image of its own
image = torch.randn(1, 1, 64, 64, dtype=torch.double)
for step in range(3):
    model(image).square().mean().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(gradients) == 14
    if dist.get_rank() == 0:
        print(step, hashlib.sha256(b"".join(one.numpy().tobytes() for one in gradients)).hexdigest())
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
