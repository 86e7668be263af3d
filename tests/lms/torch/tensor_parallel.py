"""One rank of a training with tensor parallelism, plain and under LMS: `tensor_parallel.py BACKEND [STORE RANK]`.

Prints one line of JSON: whether all bits agree, and what LMS counted. Two ranks meet at STORE, or as a launcher says.
"""

from __future__ import annotations

import copy
import json
import sys
import warnings

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import lms

WIDTH, LENGTH, STEPS = 32, 16, 4


class Feed(nn.Module):
    """Computes with DTensors all along, views and in-place operations included."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.gelu(self.up(x))
        y = y * y.sigmoid()
        y = y.view(y.shape[0], y.shape[1], -1).add(0.1).relu_()
        return self.down(torch.tanh(y))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.feed = nn.LayerNorm(WIDTH), Feed()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.feed(self.norm(x))


def parallel(mesh: object) -> nn.Module:
    """Three blocks that hand DTensors on, and one whose modules take and return each rank's part."""
    torch.manual_seed(3)
    model = nn.Sequential(*(Block() for _ in range(4)))
    for block in model[:3]:
        parallelize_module(
            block,
            mesh,
            {
                "norm": SequenceParallel(),
                "feed": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
                "feed.up": ColwiseParallel(use_local_output=False),
                "feed.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            },
        )
    parallelize_module(model[3], mesh, {"feed.up": ColwiseParallel(), "feed.down": RowwiseParallel()})
    return model


def local_bytes(tensor: Tensor) -> bytes:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return bytes(local.detach().contiguous().reshape(-1).view(torch.uint8).tolist())


def train(model: nn.Module, mesh: object) -> list[bytes]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    seen = []
    for step in range(STEPS):
        torch.manual_seed(step)
        x = DTensor.from_local(torch.randn(4, LENGTH // 2, WIDTH), mesh, [Shard(1)])
        optimizer.zero_grad()
        parts = model[3](model[:3](x).redistribute(mesh, [Replicate()]).to_local())
        loss = parts.square().mean()
        loss.backward()
        seen += [local_bytes(loss), *(local_bytes(p.grad) for p in model.parameters())]
        optimizer.step()
    return seen


def main(backend: str, store: str | None = None, rank: str = "-1") -> None:
    dist.init_process_group(backend, init_method=store, rank=int(rank), world_size=2 if store else -1)
    mesh = init_device_mesh("cpu", (2,))
    model = parallel(mesh)
    plain = train(copy.deepcopy(model), mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        session = lms.LMS(model, budget=0, min_size=0, verify=True)
        with session:
            ours = train(model, mesh)
    print(json.dumps({"same": plain == ours, **session.stats()}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
