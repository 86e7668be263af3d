"""Accelerate over the backend ddl: the script makes the process group, as Accelerate makes none of a foreign backend.

Two ranks, which ci/integrations starts in several ways.
"""

import torch
import torch.distributed as dist
from accelerate import Accelerator

import ddl.horovod.torch as hvd

dist.init_process_group("ddl")
accelerator = Accelerator(cpu=True)
assert accelerator.num_processes == dist.get_world_size() == 2
assert dist.get_backend() == "ddl"

model = torch.nn.Linear(4, 1)
torch.nn.init.ones_(model.weight)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
accelerator.backward(model(torch.full((1, 4), accelerator.process_index + 1.0)).sum())
optimizer.step()

# The inputs are 1 and 2, so that the mean gradient is 1.5 on both ranks.
weights = accelerator.gather(accelerator.unwrap_model(model).weight.detach())
assert torch.equal(weights, torch.full((2, 4), 1 - 0.5 * 1.5)), weights
hvd.init()  # Horovod's names, in the same job
assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == 2
print(f"rank {accelerator.process_index}: right", flush=True)
dist.destroy_process_group()
