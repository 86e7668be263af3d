"""Horovod's names, on each rank: collectives beside what they should give, and the optimizer beside one process."""

from __future__ import annotations

import copy
import pickle
import sys
import time
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import ddl
import ddl.horovod.torch as hvd
from ddl.horovod.torch.optimizer import Distributed

torch.set_num_threads(1)
hvd.init()
hvd.init()  # does nothing
RANK, SIZE = hvd.rank(), hvd.size()
checks = 0


def of(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small whole numbers, other ones on each rank."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-4, 5, shape, generator=generator).to(dtype)


def every(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.stack([of(rank, *shape, dtype=dtype) for rank in range(SIZE)])


def same(mine: Tensor, expected: Tensor, what: str) -> None:
    global checks
    checks += 1
    alike = mine.shape == expected.shape and mine.dtype == expected.dtype and torch.equal(mine, expected)
    assert alike, f"rank {RANK}: {what}: {mine} != {expected}"


def places() -> None:
    assert (ddl.rank(), ddl.size()) == (RANK, SIZE)
    assert (hvd.local_rank(), hvd.local_size()) == (RANK, SIZE)
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.is_initialized()
    assert hvd.is_homogeneous()
    assert hvd.mpi_built()
    assert hvd.mpi_enabled()
    assert not hvd.nccl_built()
    assert hvd.cuda_built() == torch.backends.cuda.is_built()
    assert not hvd.mpi_threads_supported()


def reductions() -> None:
    data = of(RANK, 5, 3)
    total = every(5, 3).sum(0)
    same(hvd.allreduce(data, op=hvd.Sum), total, "allreduce")
    same(data, of(RANK, 5, 3), "allreduce leaves its input")
    same(hvd.allreduce(data, name="by default an average"), total / SIZE, "allreduce, average")
    same(hvd.allreduce(data, average=False), total, "allreduce, average=False")
    same(hvd.allreduce(data, op=hvd.Min), every(5, 3).amin(0), "allreduce, Min")
    same(hvd.allreduce(data, op=hvd.Max), every(5, 3).amax(0), "allreduce, Max")
    same(hvd.allreduce(data, op=hvd.Product), every(5, 3).prod(0), "allreduce, Product")
    same(hvd.allreduce(data, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0), 2 * total, "allreduce, scaled")
    whole = of(RANK, 5, 3, dtype=torch.int32)
    halves = torch.stack([(its / 2).trunc() for its in every(5, 3)]).sum(0).int()
    same(hvd.allreduce(whole, op=hvd.Sum, prescale_factor=0.5), halves, "allreduce, whole numbers, scaled before")
    result = hvd.allreduce(whole, op=hvd.Sum, postscale_factor=0.5)
    same(result, (total / 2).trunc().int(), "allreduce, whole numbers, scaled after")
    same(hvd.allreduce(data, op=hvd.Sum, compression=hvd.Compression.fp16), total, "allreduce, compressed")
    same(hvd.allreduce(data.t(), op=hvd.Sum), total.t(), "allreduce, transposed")
    for dtype in (torch.int64, torch.uint8, torch.float64, torch.bfloat16):
        its = of(RANK, 7, dtype=dtype).abs() if dtype is not torch.uint8 else of(RANK, 7).abs().to(dtype)
        alls = [of(rank, 7, dtype=torch.int64).abs() for rank in range(SIZE)]
        same(hvd.allreduce(its, op=hvd.Sum), torch.stack(alls).sum(0).to(dtype), f"allreduce, {dtype}")
    assert hvd.allreduce_(data, op=hvd.Sum) is data
    same(data, total, "allreduce_")
    handle = hvd.allreduce_async(of(RANK, 4), op=hvd.Sum)
    same(hvd.synchronize(handle), every(4).sum(0), "allreduce_async")
    assert hvd.poll(handle)
    same(hvd.synchronize(handle), every(4).sum(0), "synchronize twice")
    several = [of(RANK, 3), of(RANK, 2, 2, dtype=torch.int32)]
    totals = [every(3).sum(0), every(2, 2, dtype=torch.int32).sum(0).int()]
    for mine, expected in zip(hvd.grouped_allreduce(several, op=hvd.Sum), totals, strict=True):
        same(mine, expected, "grouped_allreduce")
    hvd.grouped_allreduce_(several, op=hvd.Sum)
    for mine, expected in zip(several, totals, strict=True):
        same(mine, expected, "grouped_allreduce_")
    rows = 2 * SIZE + 1
    parts = every(rows, 2).sum(0).split([3] + [2] * (SIZE - 1))
    same(hvd.reducescatter(of(RANK, rows, 2), op=hvd.Sum), parts[RANK], "reducescatter")
    same(hvd.grouped_reducescatter([of(RANK, rows, 2)], op=hvd.Sum)[0], parts[RANK], "grouped_reducescatter")
    average = hvd.synchronize(hvd.reducescatter_async(of(RANK, SIZE, 2)))
    same(average, every(SIZE, 2).sum(0)[RANK : RANK + 1] / SIZE, "reducescatter_async")


def movements() -> None:
    same(hvd.allgather(of(RANK, 2, 3)), every(2, 3).flatten(0, 1), "allgather")
    uneven = torch.cat([of(rank, rank, 3) for rank in range(SIZE)])  # of rank 0 nothing
    same(hvd.allgather(of(RANK, RANK, 3)), uneven, "allgather of different numbers of rows")
    gathered = hvd.grouped_allgather([of(RANK, RANK, 3), of(RANK, 1, dtype=torch.bool)])
    same(gathered[0], uneven, "grouped_allgather")
    same(gathered[1], every(1, dtype=torch.bool).flatten(), "grouped_allgather of bool")
    root = SIZE - 1
    same(hvd.broadcast(of(RANK, 4), root), of(root, 4), "broadcast")
    data = of(RANK, 4)
    hvd.synchronize(hvd.broadcast_async_(data, root))
    same(data, of(root, 4), "broadcast_async_")
    # Rank r sends i + 1 rows to rank i.
    splits = torch.arange(1, SIZE + 1)
    rows = int(splits.sum())
    sent = [of(rank, rows, 2).split(splits.tolist()) for rank in range(SIZE)]
    received, counts = hvd.alltoall(of(RANK, rows, 2), splits)
    same(received, torch.cat([its[RANK] for its in sent]), "alltoall")
    same(counts, torch.full((SIZE,), RANK + 1, dtype=torch.int32), "alltoall's received splits")
    even = torch.cat([of(rank, SIZE)[RANK : RANK + 1] for rank in range(SIZE)])
    same(hvd.alltoall(of(RANK, SIZE)), even, "alltoall in equal parts")
    received, counts = hvd.synchronize(hvd.alltoall_async(of(RANK, SIZE)))
    same(received, even, "alltoall_async in equal parts")
    same(counts, torch.ones(SIZE, dtype=torch.int32), "alltoall_async's received splits")
    assert hvd.broadcast_object({"rank": RANK, "text": "x" * 100000}, root) == {"rank": root, "text": "x" * 100000}
    assert hvd.allgather_object("y" * RANK) == ["y" * rank for rank in range(SIZE)]
    hvd.barrier()


def gradients() -> None:
    """Of y = sum(weights * call(x)), by x, where each rank has weights of its own."""

    def gradient_of(call, *shape: int) -> Tensor:
        x = of(RANK, *shape).requires_grad_()
        y = call(x)
        (y * (of(10 + RANK, *y.shape))).sum().backward()
        return x.grad

    weights = torch.stack([of(10 + rank, 3) for rank in range(SIZE)])
    same(gradient_of(lambda x: hvd.allreduce(x, op=hvd.Sum), 3), weights.sum(0), "through allreduce")
    same(gradient_of(hvd.allreduce, 3), weights.sum(0) / SIZE, "through an average")
    same(gradient_of(lambda x: hvd.grouped_allreduce([x], op=hvd.Sum)[0], 3), weights.sum(0), "through a group")
    rows = SIZE * (SIZE + 1) // 2
    total = torch.stack([of(10 + rank, rows) for rank in range(SIZE)]).sum(0)
    mine = total[RANK * (RANK + 1) // 2 :][: RANK + 1] / SIZE
    same(gradient_of(hvd.allgather, RANK + 1), mine, "through allgather")
    same(gradient_of(lambda x: hvd.grouped_allgather([x])[0], RANK + 1), mine, "through grouped_allgather")
    expected = weights.sum(0) / SIZE if RANK == 1 else torch.zeros(3)
    same(gradient_of(lambda x: hvd.broadcast(x, 1), 3), expected, "through broadcast")
    back = torch.cat([of(10 + rank, SIZE)[RANK : RANK + 1] for rank in range(SIZE)])
    same(gradient_of(hvd.alltoall, SIZE), back, "through alltoall")
    parts = torch.cat([of(10 + rank, 1) for rank in range(SIZE)])
    same(gradient_of(lambda x: hvd.reducescatter(x, op=hvd.Sum), SIZE), SIZE * parts, "through reducescatter")
    same(gradient_of(hvd.reducescatter, SIZE), parts, "through an average's reducescatter")
    with pytest.raises(RuntimeError, match="no gradient flows through a reduction by Max"):
        gradient_of(lambda x: hvd.allreduce(x, op=hvd.Max), 3)


def process_sets() -> None:
    pair = hvd.add_process_set([SIZE - 1, 0])
    rest = hvd.add_process_set(hvd.ProcessSet(range(1, SIZE)))
    assert (pair.ranks, pair.size(), pair.included()) == ([0, SIZE - 1], 2, RANK in (0, SIZE - 1))
    if pair.included():
        assert pair.rank() == (RANK != 0)
        expected = of(0, 3) + of(SIZE - 1, 3)
        same(hvd.allreduce(of(RANK, 3), op=hvd.Sum, process_set=pair), expected, "allreduce in a set")
        same(hvd.broadcast(of(RANK, 3), SIZE - 1, process_set=pair), of(SIZE - 1, 3), "broadcast in a set")
    else:
        with pytest.raises(ValueError, match=rf"rank {RANK} is not in ProcessSet\(\[0, {SIZE - 1}\]\)"):
            hvd.allreduce(of(RANK, 3), process_set=pair)
    if rest.included():
        assert hvd.allgather_object(RANK, process_set=rest) == list(range(1, SIZE))
    with pytest.raises(ValueError, match="was added before"):
        hvd.add_process_set([0, SIZE - 1])
    assert hvd.remove_process_set(pair)
    assert not hvd.remove_process_set(hvd.global_process_set)
    with pytest.raises(ddl.StateError, match="call add_process_set first"):
        hvd.allreduce(of(RANK, 3), process_set=pair)
    hvd.remove_process_set(rest)


def refused() -> None:
    tensor = torch.zeros(3)
    cases = [
        (lambda: hvd.allreduce(tensor, op=hvd.Adasum), "DDL has no Adasum"),
        (lambda: hvd.allreduce(tensor, average=True, op=hvd.Sum), "both given"),
        (lambda: hvd.allreduce(tensor.bool(), prescale_factor=0.5), r"torch\.bool cannot be scaled"),
        (lambda: hvd.allgather(torch.tensor(1.0)), "without dimensions"),
        (lambda: hvd.alltoall(torch.zeros(SIZE + 1)), "cannot be divided equally"),
        (lambda: hvd.alltoall(tensor, [1]), "one for each rank"),
        (lambda: hvd.broadcast(tensor, SIZE), f"root_rank is {SIZE}, which is not in"),
        (lambda: hvd.broadcast_parameters({"a": 1}, 0), "a is a int, not a tensor"),
        (lambda: hvd.add_process_set([0, 0]), "different ranks"),
        (
            lambda: hvd.allgather(torch.zeros(2, 3 if RANK == 1 else 4)),
            r"rank 1 called allgather \(float32 of shape \(2, 3\)",
        ),
    ]
    for call, part in cases:
        with pytest.raises(Exception, match=part):
            call()
    hvd.barrier()


def model(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 2)).double()


def images(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(4 * SIZE, 6, generator=generator, dtype=torch.float64)
    return inputs, inputs.sum(1, keepdim=True) * torch.tensor([1.0, -1.0], dtype=torch.float64)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, mine: slice, passes: int = 1, clip: float = 0) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(5):
        optimizer.zero_grad()
        inputs, targets = (part[mine] for part in images(step))
        for half in range(passes):
            loss = nn.functional.mse_loss(net(inputs[half::passes]), targets[half::passes]) / passes
            loss.backward()
        if clip:
            if isinstance(optimizer, Distributed):
                optimizer.synchronize()
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        with optimizer.skip_synchronize() if clip and isinstance(optimizer, Distributed) else nullcontext():
            optimizer.step()
        scheduler.step()


def optimizers() -> None:
    share = slice(RANK, None, SIZE)
    cases = {
        "by default": {},
        "several passes": {"backward_passes_per_step": 2},
        "a predivided average": {"gradient_predivide_factor": 2.0},
        "as many groups": {"groups": 2},
        "clipped": {},
    }
    for name, options in cases.items():
        net, other = model(seed=RANK), model(seed=0)
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        kind = type(optimizer)
        optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters(), **options)
        assert isinstance(optimizer, kind)
        passes, clip = options.get("backward_passes_per_step", 1), 0.5 if name == "clipped" else 0
        train(net, optimizer, share, passes, clip)
        train(other, torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9), slice(None), 1, clip)
        for one, two in zip(net.parameters(), other.parameters(), strict=True):
            assert torch.allclose(one, two, rtol=1e-12, atol=1e-12), f"{name}: {(one - two).abs().max()}"
            same(one.detach(), hvd.broadcast(one.detach(), 0), f"the same bits on every rank, {name}")
    # A scheduler that was made before, and a sum.
    net, other = model(), model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1 / SIZE)
    torch.optim.lr_scheduler.StepLR(optimizer, 100)
    lists = [list(net[0].parameters()), list(net[4].parameters())]
    wrapped = hvd.DistributedOptimizer(optimizer, op=hvd.Sum, groups=lists)
    train(net, wrapped, share)
    train(other, torch.optim.SGD(other.parameters(), lr=0.1), slice(None))
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.allclose(one, two, rtol=1e-12, atol=1e-12)


def orders() -> None:
    """The script's calls between backward and step, when a bucket starts on one rank before them, on others after."""
    used = [parameter(0.0), parameter(0.0), parameter(0.0)]
    optimizer = torch.optim.SGD(used, lr=1.0)
    # Three buckets, each of the loss's type and count.
    optimizer = hvd.DistributedOptimizer(optimizer, groups=[[one] for one in used])
    for step in range(1, 4):
        optimizer.zero_grad()
        loss = 1.0 * used[0] + 100.0 * used[2]
        if RANK == 0:
            loss = loss + SIZE * 10.0 * used[1]
        loss.backward()
        average = hvd.allreduce(torch.tensor([7.0 + 2 * RANK * step]))
        optimizer.step()
        same(average, torch.tensor([7.0 + (SIZE - 1) * step]), "the loss, between backward and step")
        for one, gradient in zip(used, (1.0, 10.0, 100.0), strict=True):
            same(one.detach(), torch.tensor([-gradient * step]), f"a step with an average of {gradient}")
    # In a set of a part of the ranks: the others keep their own gradients.
    rest = hvd.add_process_set(range(1, SIZE))
    own = parameter(0.0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([own], lr=1.0), process_set=rest)
    same(own.grad, torch.zeros(1), "a gradient before the first one, as in Horovod")
    for step in range(1, 3):
        optimizer.zero_grad()
        (float(RANK + 7 * (RANK == 0)) * own).backward()
        optimizer.synchronize()
        with pytest.warns(UserWarning, match=r"without optimizer\.skip_synchronize\(\)"):
            optimizer.step()
        same(own.detach(), torch.tensor([-SIZE / 2 if RANK else -7.0]) * step, "a step in a set")
    hvd.remove_process_set(rest)
    if RANK in rest.ranks:
        own.grad = None
        with pytest.raises(ddl.StateError, match="call add_process_set first"):
            own.sum().backward()
    hvd.barrier()


def parameter(value: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor([value]))


def misuse() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for arguments, part in (
        ({"named_parameters": [("a", next(net.parameters()))]}, "has no name for parameter 1 of group 0"),
        ({"named_parameters": [("a", it) for it in net.parameters()]}, "these stand twice: a"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "is for op=Average"),
        ({"backward_passes_per_step": 0}, "must be 1 or more"),
        ({"op": hvd.Adasum}, "no Adasum"),
        ({"groups": [[net[0].weight], [net[0].weight]]}, "stands in two of them"),
    ):
        with pytest.raises((ValueError, ddl.DDLError), match=part):
            hvd.DistributedOptimizer(optimizer, **arguments)
    optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters())
    with pytest.raises(ValueError, match="reduced twice"):
        hvd.DistributedOptimizer(optimizer)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"take its state_dict\(\)"):
            copied(optimizer)
    inputs, _ = images(0)
    net(inputs).sum().backward()
    with pytest.raises(RuntimeError, match="between backward"):
        optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="backward_passes_per_step is 1"):
        net(inputs).sum().backward()
    optimizer.step()
    # Parameters that some ranks do not use, that no rank does, and that are thawed later.
    net = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(3)])
    for layer in net:
        nn.init.zeros_(layer.weight)
    net[2].requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=1.0), net.named_parameters())
    for step in range(2):
        net[2].requires_grad_(step == 1)
        used = net[0] if RANK == 0 else net[1]
        (used(torch.ones(1, 2)) + net[2](torch.ones(1, 2))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    same(net[0].weight.detach(), torch.full((2, 2), -2.0 / SIZE), "used by rank 0 alone")
    same(net[1].weight.detach(), torch.full((2, 2), -2.0 * (SIZE - 1) / SIZE), "used by the others")
    same(net[2].weight.detach(), torch.full((2, 2), -1.0), "thawed after a step")


def sparse() -> None:
    mine = torch.sparse_coo_tensor([[RANK, 1, RANK]], [1.0, 2.0, 3.0], (SIZE + 2,), check_invariants=True)
    whole = torch.zeros(SIZE + 2)
    for rank in range(SIZE):
        whole[rank] += 4.0
        whole[1] += 2.0
    same(hvd.synchronize(hvd.sparse_allreduce_async(mine, op=hvd.Sum)).to_dense(), whole, "a sparse sum")
    same(hvd.synchronize(hvd.sparse_allreduce_async(mine, "it")).to_dense(), whole / SIZE, "a sparse average")
    same(hvd.sparse_allreduce_async(mine, op=hvd.Sum)().to_dense(), whole, "as Horovod's, which is called")
    large = torch.sparse_coo_tensor([[1]], [2**60 + 1], (2,), check_invariants=True)
    total = hvd.synchronize(hvd.sparse_allreduce_async(large, op=hvd.Sum)).to_dense()
    same(total, torch.tensor([0, SIZE * (2**60 + 1)]), "a sparse sum of whole numbers")
    same(hvd.sparse_allreduce_async(large)().to_dense(), total // SIZE, "and an average")
    for wrong, part in (({"op": hvd.Max}, "only Sum and Average"), ({"tensor": torch.ones(2)}, "use allreduce")):
        with pytest.raises(ValueError, match=part):
            hvd.sparse_allreduce_async(**{"tensor": mine, **wrong})
    for options in ({"sparse_as_dense": True}, {}, {"gradient_predivide_factor": 2.0}, {"groups": 1}):
        net = nn.Sequential(nn.Embedding(SIZE + 2, 2, sparse=True), nn.Linear(2, 1))
        hvd.broadcast_parameters(net.named_parameters(), 0)
        other = copy.deepcopy(net)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.5), **options)
        alone = torch.optim.SGD(other.parameters(), lr=0.5)
        for step in range(3):
            for its in (optimizer, alone):
                its.zero_grad()
            used = range(SIZE) if step != 1 else range(1, SIZE)  # then rank 0 uses no word
            if RANK in used:
                net(torch.tensor([RANK, 1])).sum().backward()
            for rank in used:
                (other(torch.tensor([rank, 1])).sum() / SIZE).backward()
            optimizer.step()
            alone.step()
            assert net[0].weight.grad.is_sparse
        for one, two in zip(net.parameters(), other.parameters(), strict=True):
            assert torch.allclose(one, two, rtol=1e-5, atol=1e-6), (options, one, two)
            same(one.detach(), hvd.broadcast(one.detach(), 0), f"the same bits on every rank, {options}")
    # For an optimizer that takes sparse gradients only; in the first step rank 0 uses no word.
    words = nn.Embedding(4, 1, sparse=True)
    nn.init.ones_(words.weight)
    adam = hvd.DistributedOptimizer(torch.optim.SparseAdam(words.parameters(), lr=0.1), sparse_as_dense=True)
    for step in range(2):
        adam.zero_grad()
        if RANK > 0 or step == 1:
            words(torch.tensor([1])).sum().backward()
        adam.step()
    assert torch.allclose(words.weight.detach().flatten(), torch.tensor([1, 0.8, 1, 1]), atol=1e-2), words.weight
    # Each rank finds another parameter's gradient sparse, and as many numbers are reduced on all.
    words = [nn.Embedding(4, 1, sparse=True) for _ in range(2)]
    parameters = [words[0].weight, parameter(0.0), words[1].weight]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0))
    optimizer.zero_grad()  # a sparse gradient that is added to the zeros of the beginning is dense
    (words[RANK % 2](torch.tensor([1])).sum() + parameters[1].sum()).backward()
    with pytest.raises(ddl.MismatchError, match="sparse gradients, without sparse_as_dense=True, of parameter 2"):
        optimizer.step()
    hvd.barrier()


def joins() -> None:
    """Ranks with different numbers of batches, in several rounds: those that have joined add nothing."""
    for device in (-1, hvd.local_rank()):
        last = hvd.join(device)
        assert hvd.allgather_object(last) == [last] * SIZE
    for first in (0, SIZE - 1, 1):  # the rank with no batch; the one before it has the most
        batches = {rank: (rank - first) % SIZE for rank in range(SIZE)}
        for step in range(batches[RANK]):
            present = [rank for rank in range(SIZE) if batches[rank] > step]
            data = torch.stack([of(rank + step, 5) for rank in present])
            mine = of(RANK + step, 5)
            same(hvd.allreduce(mine, op=hvd.Sum), data.sum(0), f"a sum, {present}")
            same(hvd.allreduce(mine), data.sum(0) / SIZE, f"an average over all, {present}")
            same(hvd.allreduce(mine - 9, op=hvd.Max), (data - 9).amax(0), f"a maximum, {present}")
            same(hvd.allreduce(mine + 9, op=hvd.Min), (data + 9).amin(0), f"a minimum, {present}")
            same(hvd.allreduce(mine, op=hvd.Product), data.prod(0), f"a product, {present}")
            kinds = (torch.float16, torch.int32, torch.uint8)
            handle = hvd.grouped_allreduce_async([mine.abs().to(kind) for kind in kinds], op=hvd.Max)
            later = hvd.allreduce_async(mine.double(), op=hvd.Sum)
            for kind, result in zip(kinds, hvd.synchronize(handle), strict=True):
                same(result, data.abs().amax(0).to(kind), f"a group, {kind}, {present}")
            same(hvd.synchronize(later), data.sum(0).double(), f"one of two at once, {present}")
            if first == 0 and step == 1:
                time.sleep(0.3)  # longer than a rank takes to hear of those that have joined, before its next call
        last = hvd.join()
        assert last == (first - 1) % SIZE, f"rank {RANK}: {last} was the last, but {first} had no batch"
        same(hvd.allreduce(of(RANK, 3), op=hvd.Sum), every(3).sum(0), "after a round")
    # Calls that a rank does not wait for before it joins.
    handles = [hvd.allreduce_async(of(RANK + step, 3), op=hvd.Sum) for step in range(RANK)]
    assert hvd.join() == SIZE - 1
    for step, handle in enumerate(handles):
        total = torch.stack([of(rank + step, 3) for rank in range(step + 1, SIZE)]).sum(0)
        same(hvd.synchronize(handle), total, "after all have joined")
    joins_of_optimizers()
    joins_of_optimizers(compression=hvd.Compression.fp16)
    joins_of_optimizers(backward_passes_per_step=2)
    joins_in_sets()


def joins_of_optimizers(**arguments: object) -> None:
    """Rank r has r + 1 batches: a step's gradient is the sum of those that have one, over all ranks."""
    net, other = model(), model()
    passes = arguments.get("backward_passes_per_step", 1)
    bound = 1e-2 if "compression" in arguments else 1e-12
    options = {"lr": 0.1, "momentum": 0.9}
    wrapped = torch.optim.SGD(net.parameters(), **options)
    wrapped = hvd.DistributedOptimizer(wrapped, net.named_parameters(), groups=2, **arguments)
    alone = torch.optim.SGD(other.parameters(), **options)
    for step in range(SIZE):
        present = [rank for rank in range(SIZE) if rank >= step]
        inputs, targets = images(step)
        alone.zero_grad()
        for rank in present:
            share = slice(rank, None, SIZE)
            (nn.functional.mse_loss(other(inputs[share]), targets[share]) / SIZE).backward()
        alone.step()
        if RANK in present:
            share = slice(RANK, None, SIZE)
            wrapped.zero_grad()
            for _ in range(passes):
                (nn.functional.mse_loss(net(inputs[share]), targets[share]) / passes).backward()
            loss = hvd.allreduce(torch.tensor([1.0]), op=hvd.Sum)  # between two calls of the optimizer
            wrapped.step()
            same(loss, torch.tensor([float(len(present))]), "how many have a batch")
    last = hvd.join()
    assert last == SIZE - 1, last
    hvd.broadcast_parameters(net.state_dict(), last)
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.allclose(one, two, rtol=bound, atol=bound), (arguments, (one - two).abs().max())


def joins_in_sets() -> None:
    """In a set whose first rank has joined, and which rank 0 is not in."""
    rest = hvd.add_process_set(range(1, SIZE))
    own = parameter(0.0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([own], lr=1.0), process_set=rest)
    gone = 1
    if gone < RANK:
        for step in range(3):
            expected = torch.stack([of(rank + step, 4) for rank in range(gone + 1, SIZE)]).sum(0)
            same(hvd.allreduce(of(RANK + step, 4), op=hvd.Sum, process_set=rest), expected, "in a set")
            optimizer.zero_grad()
            (float(RANK) * own).backward()
            optimizer.step()
            average = sum(range(gone + 1, SIZE)) / (SIZE - 1)
            same(own.detach(), torch.tensor([-average * (step + 1)]), "a step in a set")
    hvd.join()
    hvd.remove_process_set(rest)
    hvd.barrier()


def states() -> None:
    """Rank 0's state of an optimizer, wherever it was trained."""
    net = model()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1 * (RANK + 1))
    if RANK == 0:
        net(images(0)[0]).sum().backward()
        optimizer.step()
    hvd.broadcast_parameters(net.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    # Parameters without names, of two rows each: no pairs.
    for listed in (list, iter):
        pair = nn.Linear(3, 2, bias=False), nn.Linear(4, 2, bias=False)
        for number, layer in enumerate(pair):
            nn.init.constant_(layer.weight, 10.0 * RANK + number)
        hvd.broadcast_parameters(listed([layer.weight for layer in pair]), SIZE - 1)
        for number, layer in enumerate(pair):
            expected = torch.full_like(layer.weight, 10.0 * (SIZE - 1) + number)
            same(layer.weight.detach(), expected, "broadcast_parameters of a list")
    assert optimizer.param_groups[0]["lr"] == 0.1
    for parameter in net.parameters():
        state = optimizer.state[parameter]
        assert state["step"] == 1
        same(state["exp_avg"], hvd.broadcast(state["exp_avg"], 0), "Adam's state")


parts = [
    places,
    reductions,
    movements,
    gradients,
    process_sets,
    refused,
    optimizers,
    orders,
    misuse,
    sparse,
    joins,
    states,
]
for part in parts:
    if sys.argv[1:] in ([], [part.__name__]):
        part()
hvd.shutdown()
assert not hvd.is_initialized()
with pytest.raises(ddl.StateError, match=r"call init\(\) first"):
    hvd.rank()
hvd.init()
same(hvd.allreduce(of(RANK, 2), op=hvd.Sum), every(2).sum(0), "after another init")
hvd.shutdown()
print(f"rank {RANK}: {checks} checks", flush=True)
