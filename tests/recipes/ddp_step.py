"""The test of the recipe bascule-pytorch: three steps of DistributedDataParallel over DDL, to be run under `lms run`.

Rank 0 prints each gradient to the last bit, which is the mean over all ranks.
"""

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
    (first, *_) = model.parameters()
    assert first.grad is not None
    if dist.get_rank() == 0:
        print(step, first.grad.sum().item().hex())
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
