"""FSDP2 over the backend ddl on two ranks, plain and with LMS: the same bits."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lms


def train(swap: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    model = nn.Sequential(*blocks, nn.Linear(64, 4))
    mesh = init_device_mesh("cpu", (2,))
    for one in [*blocks, model]:
        fully_shard(one, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []

    def run() -> None:
        for step in range(6):
            numbers = torch.Generator().manual_seed(2 * step + dist.get_rank())
            x, y = torch.randn(16, 64, generator=numbers), torch.randint(0, 4, (16,), generator=numbers)
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())

    if not swap:
        run()
    else:
        with lms.LMS(model, optimizer, budget=0, min_size=0, swap=swap) as session:
            run()
        assert session.stats()["swapped_in"] > 0, session.stats()
    return [*losses, *(parameter.full_tensor() for parameter in model.parameters())]


dist.init_process_group("ddl")
expected = train("")
for swap in ("activations", "activations,optimizer", "activations,optimizer,parameters,gradients"):
    found = train(swap)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)), swap
print(f"rank {dist.get_rank()}: right", flush=True)
dist.destroy_process_group()
