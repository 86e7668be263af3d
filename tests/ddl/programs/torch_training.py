"""Training through torch.distributed's own machinery by the backend ddl: DDP, FSDP2, DTensor, checkpoints."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_num_threads(1)
dist.init_process_group("ddl")
RANK, SIZE = dist.get_rank(), dist.get_world_size()
GLOO = dist.new_group(backend="gloo")
STEPS = 6


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(48, 12, generator=generator)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long() + (inputs[:, 0] > 0.5).long())


def train(net: nn.Module, batches, steps: int = STEPS, accumulate: bool = False) -> list[float]:
    """The mean loss over the global batch of each step; `batches` are this rank's."""
    optimiser = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for _, (inputs, targets) in zip(range(steps), batches, strict=False):
        optimiser.zero_grad()
        if accumulate:
            half = len(inputs) // 2
            with net.no_sync():
                (nn.functional.cross_entropy(net(inputs[:half]), targets[:half]) / 2).backward()
            inputs, targets = inputs[half:], targets[half:]
            loss = nn.functional.cross_entropy(net(inputs), targets) / 2
        else:
            loss = nn.functional.cross_entropy(net(inputs), targets)
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def ddp() -> None:
    dataset = data()
    sampler = DistributedSampler(dataset, shuffle=False)
    for buckets_mb in (25, 0.001):  # all in one; one for each parameter, in flight beside backward
        net = DistributedDataParallel(model(), bucket_cap_mb=buckets_mb)
        losses = torch.tensor(train(net, DataLoader(dataset, 2, sampler=sampler)))
        dist.all_reduce(losses, dist.ReduceOp.AVG)
        # One process with the global batch: what all ranks' samplers give in a step.
        order = torch.arange(48).view(-1, 2, SIZE).transpose(1, 2).reshape(-1)
        alone = model()
        expected = train(alone, DataLoader(TensorDataset(*dataset[order]), 2 * SIZE))
        assert torch.allclose(losses, torch.tensor(expected), rtol=1e-5), (losses, expected)
        for one, other in zip(net.module.parameters(), alone.parameters(), strict=True):
            assert torch.allclose(one, other, atol=1e-5)
            same_on_all_ranks(one)
    train(DistributedDataParallel(model()), DataLoader(dataset, 4, sampler=sampler), accumulate=True)
    hooked = DistributedDataParallel(model())
    hooked.register_comm_hook(None, fp16_compress_hook)
    train(hooked, DataLoader(dataset, 2, sampler=sampler))
    for parameter in hooked.parameters():
        same_on_all_ranks(parameter)
    odd = DistributedDataParallel(Odd())
    odd(torch.randn(2, 3, 4, 4) + RANK).sum().backward()
    for parameter in odd.parameters():
        same_on_all_ranks(parameter.grad)
    joins()
    norm = DistributedDataParallel(nn.BatchNorm1d(12), broadcast_buffers=True)
    for _ in range(2):  # the second call begins with rank 0's buffers
        norm(torch.randn(4, 12) + RANK)
    norm.eval()
    norm(torch.zeros(1, 12))


def joins() -> None:
    """Ranks with more batches than others go on, as over gloo: the averages are over those that still train."""
    weights = []
    for group in (None, GLOO):
        net = DistributedDataParallel(model(), process_group=group)
        optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
        with net.join(divide_by_initial_world_size=False):
            for step in range(2 + RANK):
                optimiser.zero_grad()
                result = net(torch.ones(2, 12) * (step + 1 + RANK)).sum()
                for _ in range(10 if step == 0 else 0):  # other counts, before DDP looks at its own
                    dist.all_reduce(torch.ones(1), group=group, async_op=True).wait()
                result.backward()
                optimiser.step()
        weights.append(torch.cat([its.detach().reshape(-1) for its in net.parameters()]))
    assert torch.allclose(*weights, atol=1e-6), weights


class Odd(nn.Module):
    """Parameters of no elements, of one, and of another layout than the usual."""

    def __init__(self) -> None:
        super().__init__()
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.one = nn.Parameter(torch.ones(()))
        self.channels_last = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)

    def forward(self, image):
        return self.channels_last(image) * self.one + self.none.sum()


class Waits(torch.autograd.Function):
    """Its backward goes on once the first bucket was reduced: which it must be while backward is under way."""

    @staticmethod
    def forward(context, tensor, reduced):
        context.reduced = reduced
        return tensor.clone()

    @staticmethod
    def backward(context, gradient):
        assert len(context.reduced) == 1, f"{len(context.reduced)} buckets were given to reduce before this gradient"
        deadline = time.monotonic() + 60
        while not context.reduced[0].done():
            assert time.monotonic() < deadline, "the first bucket waits for the end of backward"
            time.sleep(0.001)
        return gradient, None


class Early(nn.Module):
    """Two layers, a bucket each; backward waits between them."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.above = nn.Linear(64, 64), nn.Linear(64, 64)
        self.reduced = []
        self.waits = False

    def forward(self, inputs):
        features = self.below(inputs)
        return self.above(Waits.apply(features, self.reduced) if self.waits else features)


def buckets_in_flight() -> None:
    net = Early()
    ddp = DistributedDataParallel(net, bucket_cap_mb=0.01)

    def hook(_, bucket):
        future = dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, async_op=True).get_future()
        net.reduced.append(future)
        return future.then(lambda done: done.value()[0])

    ddp.register_comm_hook(None, hook)
    for step in range(3):
        net.reduced.clear()
        net.waits = step > 0  # in the first, one bucket has all; then they are made in the order of the gradients
        ddp.zero_grad()
        ddp(torch.ones(2, 64) * (RANK + 1)).sum().backward()
        assert len(net.reduced) == 1 + net.waits
        assert torch.allclose(net.below.bias.grad, 2 * net.above.weight.sum(0), atol=1e-5)
        same_on_all_ranks(net.above.weight.grad)


def same_on_all_ranks(tensor: torch.Tensor) -> None:
    every = [torch.empty_like(tensor) for _ in range(SIZE)]
    dist.all_gather(every, tensor.detach(), group=GLOO)
    assert all(torch.equal(one, every[0]) for one in every)


def sharded(mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> nn.Module:
    net = model()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(net, mesh=mesh, mp_policy=policy)


def fsdp() -> None:
    dataset = data()
    sampler = DistributedSampler(dataset, shuffle=False)
    batches = list(DataLoader(dataset, 2, sampler=sampler))
    policies = [MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)]
    for policy in policies:
        meshes = [init_device_mesh("cpu", (SIZE,)), DeviceMesh.from_group(GLOO, "cpu")]
        nets = [sharded(mesh, policy) for mesh in meshes]
        losses = [train(net, batches) for net in nets]
        assert torch.allclose(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-4), losses
        over_ranks = torch.tensor(losses[0])
        dist.all_reduce(over_ranks, dist.ReduceOp.AVG)
        assert over_ranks[3:].mean() < over_ranks[:3].mean(), over_ranks
    # Hybrid: sharded in pairs, replicated over them.
    mesh = init_device_mesh("cpu", (2, SIZE // 2), mesh_dim_names=("replicate", "shard"))
    hybrid = train(sharded(mesh, policies[0]), batches)
    first = train(sharded(init_device_mesh("cpu", (SIZE,)), policies[0]), batches)
    assert torch.allclose(torch.tensor(hybrid), torch.tensor(first), rtol=1e-4), (hybrid, first)


def resume() -> None:
    """FSDP2 with AdamW over both: gloo's losses; and from a checkpoint of half of the steps on, the same bits."""
    folder = [tempfile.mkdtemp() if RANK == 0 else None]
    dist.broadcast_object_list(folder, 0)
    batches = list(DataLoader(data(), 2, sampler=DistributedSampler(data(), shuffle=False)))[:STEPS]
    half = len(batches) // 2

    def made(mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
        net = sharded(mesh, MixedPrecisionPolicy())
        return net, torch.optim.AdamW(net.parameters(), lr=0.05)

    def trained(net: nn.Module, optimiser: torch.optim.Optimizer, its) -> list[float]:
        losses = []
        for inputs, targets in its:
            optimiser.zero_grad()
            loss = nn.functional.cross_entropy(net(inputs), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimiser.step()
            losses.append(float(loss.detach()))
        return losses

    mesh = init_device_mesh("cpu", (SIZE,))
    whole, its_optimiser = made(mesh)
    expected = trained(whole, its_optimiser, batches)
    of_gloo = trained(*made(DeviceMesh.from_group(GLOO, "cpu")), batches)
    assert torch.allclose(torch.tensor(expected), torch.tensor(of_gloo), rtol=1e-4), (expected, of_gloo)

    first = made(mesh)
    losses = trained(*first, batches[:half])
    model_state, optimiser_state = get_state_dict(*first)
    checkpoint.save({"model": model_state, "optimiser": optimiser_state}, checkpoint_id=folder[0])
    second = made(mesh)
    model_state, optimiser_state = get_state_dict(*second)
    state = {"model": model_state, "optimiser": optimiser_state}
    checkpoint.load(state, checkpoint_id=folder[0])
    set_state_dict(*second, model_state_dict=state["model"], optim_state_dict=state["optimiser"])
    losses += trained(*second, batches[half:])
    assert losses == expected, (losses, expected)
    for one, two in zip(whole.parameters(), second[0].parameters(), strict=True):
        assert torch.equal(one.to_local(), two.to_local())


def save_and_load() -> None:
    folder = [tempfile.mkdtemp() if RANK == 0 else None]
    dist.broadcast_object_list(folder, 0)
    batches = list(DataLoader(data(), 2, sampler=DistributedSampler(data(), shuffle=False)))
    mesh = init_device_mesh("cpu", (SIZE,))
    net = sharded(mesh, MixedPrecisionPolicy())
    train(net, batches)
    checkpoint.save({"model": net.state_dict()}, checkpoint_id=folder[0])
    other = sharded(mesh, MixedPrecisionPolicy())
    state = {"model": other.state_dict()}
    checkpoint.load(state, checkpoint_id=folder[0])
    other.load_state_dict(state["model"])
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.to_local(), two.to_local())
        assert torch.equal(one.full_tensor(), two.full_tensor())
    future = checkpoint.async_save({"model": net.state_dict()}, checkpoint_id=f"{folder[0]}/later")
    future.result()
    dist.barrier()
    if RANK == 0:
        assert Path(folder[0], "later", ".metadata").is_file()


def dtensor() -> None:
    mesh = init_device_mesh("cpu", (SIZE,))
    for shape in ((8, 12), (7, 5)):  # even over the ranks, and not
        torch.manual_seed(0)
        full = torch.randn(shape)
        for before in (Shard(0), Shard(1), Replicate()):
            tensor = distribute_tensor(full, mesh, [before])
            for after in (Shard(0), Shard(1), Replicate()):
                moved = tensor.redistribute(mesh, [after])
                assert torch.equal(moved.full_tensor(), full), (shape, before, after)
        part = DTensor.from_local(full * (RANK + 1), mesh, [Partial()])
        total = full * sum(range(1, SIZE + 1))
        for after in (Shard(0), Shard(1), Replicate()):
            assert torch.allclose(part.redistribute(mesh, [after]).full_tensor(), total)
    grid = init_device_mesh("cpu", (2, SIZE // 2), mesh_dim_names=("rows", "columns"))
    full = torch.arange(64.0).view(8, 8)
    tensor = distribute_tensor(full, grid, [Shard(0), Shard(1)])
    assert torch.equal(tensor.redistribute(grid, [Replicate(), Shard(0)]).full_tensor(), full)
    product = distribute_tensor(full, grid, [Shard(0), Replicate()]) @ distribute_tensor(
        full, grid, [Replicate(), Shard(1)]
    )
    assert torch.equal(product.full_tensor(), full @ full)


parts = {part.__name__: part for part in (ddp, buckets_in_flight, fsdp, resume, save_and_load, dtensor)}
for name in sys.argv[1:] or parts:
    parts[name]()
    dist.barrier()
    print(f"rank {RANK}: {name}", flush=True)
dist.destroy_process_group()
