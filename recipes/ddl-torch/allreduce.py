"""Two ranks of torch.distributed add a tensor over the backend in C++."""

import torch
import torch.distributed as dist

dist.init_process_group("ddl")
values = torch.arange(10007, dtype=torch.float64) * (dist.get_rank() + 1)
dist.all_reduce(values)
assert dist.get_world_size() == 2
assert torch.equal(values, 3 * torch.arange(10007, dtype=torch.float64))
dist.destroy_process_group()
