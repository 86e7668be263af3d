"""An optimizer's state from rank 0 to the others: how many MiB a rank grows by at most meanwhile, and that it is right.

The argument is the state's size in MiB.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch

import ddl.horovod.torch as hvd

torch.set_num_threads(1)
hvd.init()
NBYTES = int(sys.argv[1]) << 20
weights = [torch.nn.Parameter(torch.zeros(NBYTES // 64)) for _ in range(8)]  # two moments of each
optimizer = torch.optim.Adam(weights)
if hvd.rank() == 0:
    for number, weight in enumerate(weights):
        weight.grad = torch.full_like(weight, float(number))
    optimizer.step()
    for weight in weights:
        weight.grad = None
hvd.barrier()


def resident(what: str) -> int:
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) << 10


Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins here
before = resident("VmRSS")
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
grown = (resident("VmHWM") - before) / 2**20
for number, weight in enumerate(weights):
    state = optimizer.state[weight]
    assert state["step"].item() == 1
    assert torch.allclose(state["exp_avg"], torch.full_like(weight, 0.1 * number))
    assert torch.allclose(state["exp_avg_sq"], torch.full_like(weight, 0.001 * number * number))
print(f"rank {hvd.rank()}: grew by {max(0, grown):.0f} MiB", flush=True)
hvd.shutdown()
