"""Every collective of torch.distributed by the backend ddl beside gloo's result on the same data, on each rank."""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

dist.init_process_group("ddl", timeout=timedelta(seconds=60))
RANK, SIZE = dist.get_rank(), dist.get_world_size()
GLOO = dist.new_group(backend="gloo")
GROUPS = (None, GLOO)  # None is ddl's
TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8]
MOVED = [*TYPES, torch.bool, torch.int16, torch.complex64, torch.float8_e4m3fn]
checks = 0


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Small whole numbers: sums and products of them are exact in every type."""
    generator = torch.Generator().manual_seed(1000 * seed + RANK)
    return torch.randint(0, 3, shape, generator=generator).to(dtype)


def same(mine: object, theirs: object, what: str) -> None:
    global checks
    checks += 1
    ours, others = list(tensors_of(mine)), list(tensors_of(theirs))
    assert len(ours) == len(others), what
    for one, other in zip(ours, others, strict=True):
        alike = one.shape == other.shape and one.dtype == other.dtype
        alike = alike and torch.equal(bits(one), bits(other))
        assert alike, f"rank {RANK}: {what}: {one} != {other}"


def bits(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1)).view(torch.uint8)


def tensors_of(it: object):
    if isinstance(it, Tensor):
        yield it
    else:
        for part in it:
            yield from tensors_of(part)


def layouts(tensor: Tensor):
    """The same numbers, in other memory: as they are, with strides, at an odd address, with the other sign, ..."""
    yield "contiguous", tensor.clone()
    wide = torch.zeros((*tensor.shape, 2), dtype=tensor.dtype)
    wide[..., 0] = tensor
    yield "strided", wide[..., 0]
    padded = torch.zeros(tensor.numel() + 3, dtype=tensor.dtype)
    padded[3:] = tensor.reshape(-1)
    yield "a view", padded[3:].view(tensor.shape)
    if tensor.numel() > 0:
        odd = torch.frombuffer(bytearray(1 + tensor.nbytes), dtype=tensor.dtype, offset=1)
        yield "at an odd address", odd.copy_(tensor.reshape(-1)).view(tensor.shape)
    if tensor.dim() == 2:
        yield "transposed", tensor.t().contiguous().t()
    yield "with the negative bit", torch._neg_view(-tensor)


def reductions() -> None:
    ops = [dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT]
    for dtype in TYPES:
        for op in ops:
            data = numbers(7, 3, dtype=dtype)
            results = [data.clone(), data.clone()]
            for result, group in zip(results, GROUPS, strict=True):
                dist.all_reduce(result, op, group=group)
            same(*results, f"all_reduce {dtype} {op}")
    for count in (0, 1, 5, 4097, 100003):
        data = numbers(count)
        for name, tensor in layouts(data):
            expected = data.clone()
            dist.all_reduce(expected, group=GLOO)
            dist.all_reduce(tensor)
            same(tensor, expected, f"all_reduce of {count}, {name}")
    matrix = numbers(6, 4)
    for name, tensor in layouts(matrix):
        expected = matrix.clone()
        dist.all_reduce(expected, group=GLOO)
        dist.all_reduce(tensor, async_op=True).wait()
        same(tensor, expected, f"all_reduce, asynchronous, {name}")
    data = numbers(50, dtype=torch.float64)
    every = [torch.empty_like(data) for _ in range(SIZE)]
    dist.all_gather(every, data, group=GLOO)
    dist.all_reduce(data, dist.ReduceOp.AVG)
    same(data, torch.stack(every).sum(0) / SIZE, "all_reduce by AVG")
    flags = numbers(33, dtype=torch.bool)
    every = [torch.empty_like(flags) for _ in range(SIZE)]
    dist.all_gather(every, flags)
    for op, expected in (
        (dist.ReduceOp.SUM, torch.stack(every).any(0)),
        (dist.ReduceOp.MAX, torch.stack(every).any(0)),
        (dist.ReduceOp.MIN, torch.stack(every).all(0)),
        (dist.ReduceOp.PRODUCT, torch.stack(every).all(0)),
    ):
        result = flags.clone()
        dist.all_reduce(result, op)
        same(result, expected, f"all_reduce of bool by {op}")
    numbers_ = torch.complex(numbers(9), numbers(9, seed=1))
    results = [numbers_.clone(), numbers_.clone()]
    for result, group in zip(results, GROUPS, strict=True):
        dist.all_reduce(result, group=group)
    same(*results, "all_reduce of complex numbers")
    for root in range(SIZE):
        data = numbers(11, seed=root)
        results = [data.clone(), data.clone()]
        for result, group in zip(results, GROUPS, strict=True):
            dist.reduce(result, root, group=group)
        same(results[0], results[1] if root == RANK else data, f"reduce to {root}")
    several = [numbers(4), numbers(2, 3, seed=1), numbers(1, seed=2)]
    results = [[tensor.clone() for tensor in several] for _ in GROUPS]
    for result, group in zip(results, GROUPS, strict=True):
        dist.all_reduce_coalesced(result, group=group)
    same(*results, "all_reduce_coalesced")


def coalesced() -> None:
    """Forms of several tensors, as FSDP2 and DTensor call them; and all by the names that older versions call."""
    inputs = [numbers(SIZE * 4), numbers(SIZE * 2, 3, seed=1)]
    gathered = [torch.zeros(SIZE * its.shape[0], *its.shape[1:]) for its in inputs]
    totals = [its.clone() for its in inputs]
    for out, total, its in zip(gathered, totals, inputs, strict=True):
        dist.all_gather_into_tensor(out, its, group=GLOO)
        dist.all_reduce(total, group=GLOO)
    parts = [total.chunk(SIZE)[RANK] for total in totals]
    manager = dist.distributed_c10d._coalescing_manager
    for wait in (False, True):
        outputs = [[torch.zeros_like(its) for its in expected] for expected in (gathered, parts)]
        reduced = [its.clone() for its in inputs]
        with manager(async_ops=wait) as first:
            for out, its in zip(outputs[0], inputs, strict=True):
                dist.all_gather_into_tensor(out, its)
        with manager(async_ops=wait) as second:
            for out, its in zip(outputs[1], inputs, strict=True):
                dist.reduce_scatter_tensor(out, its)
        with manager(async_ops=wait) as third:
            for its in reduced:
                dist.all_reduce(its)
        for batch in (first, second, third) if wait else ():
            batch.wait()
        same([*outputs, reduced], [gathered, parts, totals], f"coalesced calls, waited for: {wait}")
    same(functional.all_gather_into_tensor_coalesced(inputs, dist.group.WORLD), gathered, "functional gather")
    scattered = functional.reduce_scatter_tensor_coalesced(inputs, "sum", [0] * len(inputs), dist.group.WORLD)
    same(scattered, parts, "functional reduce_scatter")
    same(functional.all_reduce_coalesced(inputs, "sum", dist.group.WORLD), totals, "functional all_reduce")

    group = dist.group.WORLD
    swapped = torch.empty_like(inputs[0])
    dist.all_to_all_single(swapped, inputs[0], group=GLOO)
    for names, arguments, expected in (
        (("_allgather_base", "all_gather_single"), (inputs[0],), gathered[0]),
        (("allgather_into_tensor_coalesced", "all_gather_single_coalesced"), (inputs,), gathered),
        (("_reduce_scatter_base", "reduce_scatter_single"), (inputs[0],), parts[0]),
        (("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"), (inputs,), parts),
        (("alltoall_base", "all_to_all_single"), (inputs[0], [], []), swapped),
    ):
        for name in names:
            made = [torch.zeros_like(its) for its in tensors_of(expected)]
            getattr(group, name)(made if isinstance(expected, list) else made[0], *arguments).wait()
            same(made, expected, name)


def scatters() -> None:
    for name, block in layouts(numbers(5, 2)):
        inputs = [numbers(5, 2, seed=rank) for rank in range(SIZE)]
        inputs[0] = block
        outputs = [torch.zeros(5, 2), torch.zeros(5, 2)]
        total = torch.stack(inputs).clone()
        dist.all_reduce(total, group=GLOO)
        dist.reduce_scatter(outputs[0], inputs)
        same(outputs[0], total[RANK], f"reduce_scatter, {name}")
    for dtype in TYPES:
        data = numbers(SIZE * 4, 3, dtype=dtype)
        total = data.clone()
        dist.all_reduce(total, group=GLOO)
        part = torch.empty(4, 3, dtype=dtype)
        dist.reduce_scatter_tensor(part, data)
        same(part, total[4 * RANK : 4 * RANK + 4], f"reduce_scatter_tensor {dtype}")
        inside = data.clone()
        view = inside[4 * RANK : 4 * RANK + 4]
        dist.reduce_scatter_tensor(view, inside)
        same(view, total[4 * RANK : 4 * RANK + 4], f"reduce_scatter_tensor into its input {dtype}")
    uneven = [numbers(rank + 1, seed=rank) for rank in range(SIZE)]
    totals = [tensor.clone() for tensor in uneven]
    for tensor in totals:
        dist.all_reduce(tensor, group=GLOO)
    part = torch.empty(RANK + 1)
    dist.reduce_scatter(part, uneven)
    same(part, totals[RANK], "reduce_scatter of different sizes")
    if SIZE > 2:
        # On rank 0 one tensor stands for all blocks but the last.
        one = numbers(3, seed=5)
        blocks = [one if RANK == 0 else numbers(3, seed=10 + rank) for rank in range(SIZE - 1)] + [numbers(2, seed=6)]
        totals = [block.clone() for block in blocks]
        for tensor in totals:
            dist.all_reduce(tensor, group=GLOO)
        part = torch.empty_like(blocks[RANK])
        dist.reduce_scatter(part, blocks)
        same(part, totals[RANK], "reduce_scatter of different sizes, of one tensor for several ranks")
    empty = torch.empty(0)
    dist.reduce_scatter_tensor(empty, torch.empty(0))
    for root in range(SIZE):
        blocks = [numbers(3, seed=rank + root) for rank in range(SIZE)] if root == RANK else None
        outputs = [torch.zeros(3), torch.zeros(3)]
        for output, group in zip(outputs, GROUPS, strict=True):
            dist.scatter(output, blocks, root, group=group)
        same(*outputs, f"scatter from {root}")
        strided = torch.zeros(3, 2)[:, 0]
        dist.scatter(strided, blocks, root)
        same(strided, outputs[1], f"scatter from {root} to a strided tensor")


def gathers() -> None:
    for dtype in MOVED:
        data = numbers(3, 5, dtype=dtype)
        bits = [torch.empty((3, 5), dtype=dtype) for _ in range(SIZE)]
        dist.all_gather(bits, data)
        theirs = [torch.empty(data.nbytes, dtype=torch.uint8) for _ in range(SIZE)]
        dist.all_gather(theirs, data.view(-1).view(torch.uint8), group=GLOO)
        same([one.view(-1).view(torch.uint8) for one in bits], theirs, f"all_gather {dtype}")
        moved = numbers(40000, dtype=dtype)
        expected = moved.view(torch.uint8).clone()
        dist.broadcast(expected, SIZE - 1, group=GLOO)
        dist.broadcast(moved, SIZE - 1)
        same(moved.view(torch.uint8), expected, f"broadcast {dtype}")
    data = numbers(4, 3)
    for name, tensor in layouts(data):
        for target in (torch.zeros(SIZE * 4, 3), torch.zeros(SIZE, 4, 3), torch.zeros(SIZE * 4, 6)[:, ::2]):
            expected = torch.zeros(SIZE * 4, 3)
            dist.all_gather_into_tensor(expected, data, group=GLOO)
            dist.all_gather_into_tensor(target, tensor)
            same(target.reshape(-1, 3), expected, f"all_gather_into_tensor, {name}, {tuple(target.shape)}")
        lists = [[torch.zeros(3, 4).t() for _ in range(SIZE)], [torch.zeros(4, 3) for _ in range(SIZE)]]
        dist.all_gather(lists[0], tensor)
        dist.all_gather(lists[1], data, group=GLOO)
        same(*lists, f"all_gather, {name}")
    inside = torch.zeros(SIZE * 2)
    inside[2 * RANK : 2 * RANK + 2] = RANK + 1
    dist.all_gather_into_tensor(inside, inside[2 * RANK : 2 * RANK + 2])
    same(inside, torch.arange(1.0, SIZE + 1).repeat_interleave(2), "all_gather_into_tensor in place")
    uneven = [torch.zeros(rank + 1) for rank in range(SIZE)]
    dist.all_gather(uneven, torch.full((RANK + 1,), float(RANK)))
    same(uneven, [torch.full((rank + 1,), float(rank)) for rank in range(SIZE)], "all_gather of different sizes")
    for root in range(SIZE):
        for name, tensor in layouts(numbers(2, 3, seed=root)):
            targets = [[torch.zeros(2, 3) for _ in range(SIZE)] if root == RANK else None for _ in GROUPS]
            dist.gather(tensor, targets[0], root)
            dist.gather(tensor.contiguous(), targets[1], root, group=GLOO)
            if root == RANK:
                same(*targets, f"gather to {root}, {name}")
            sent = [tensor.clone(), tensor.clone()]
            for buffer, group in zip(sent, GROUPS, strict=True):
                dist.broadcast(buffer, root, group=group)
            received = tensor
            dist.broadcast(received, root)
            same([*sent, received], [sent[1]] * 3, f"broadcast from {root}, {name}")
    objects: list[list[object]] = [[None] * SIZE for _ in GROUPS]
    for found, group in zip(objects, GROUPS, strict=True):
        dist.all_gather_object(found, {"rank": RANK, "data": "x" * 1000 * RANK}, group=group)
    assert objects[0] == objects[1]
    shared = [RANK, "text"] if RANK == 0 else [None, None]
    dist.broadcast_object_list(shared, 0)
    assert shared == [0, "text"]
    mine: list[object] = [None]
    dist.scatter_object_list(mine, [f"for {rank}" for rank in range(SIZE)] if RANK == 0 else None, 0)
    assert mine == [f"for {RANK}"]


def exchanges() -> None:
    for dtype in MOVED[:-1]:
        data = numbers(SIZE * 3, 2, dtype=dtype)
        mine, every = torch.empty_like(data), [torch.empty_like(data) for _ in range(SIZE)]
        dist.all_to_all_single(mine, data)
        dist.all_gather(every, data)
        same(mine, torch.cat([its[3 * RANK : 3 * RANK + 3] for its in every]), f"all_to_all_single {dtype}")
    with torch.inference_mode():
        made_for_inference = torch.zeros(SIZE)
    dist.all_to_all_single(made_for_inference, torch.full((SIZE,), float(RANK)))
    same(
        made_for_inference, torch.arange(float(SIZE)), "all_to_all_single into an inference tensor outside of its mode"
    )
    normal = torch.zeros(SIZE)
    dist.all_to_all_single(normal, torch.zeros(SIZE))
    assert normal._version > 0, "autograd does not see that a tensor has changed"
    for factor in (1, 20000):
        splits = [
            (rank + RANK) % 3 * factor for rank in range(SIZE)
        ]  # what this rank and `rank` exchange; some nothing
        data = numbers(sum(splits), 2, seed=9)
        results = [torch.zeros(sum(splits), 2) for _ in GROUPS]
        for result, group in zip(results, GROUPS, strict=True):
            dist.all_to_all_single(result, data, splits, splits, group=group)
        same(*results, f"all_to_all_single of different sizes, {factor}")
        inputs = [numbers(split, seed=rank) for rank, split in enumerate(splits)]
        outputs = [[torch.zeros(split) for split in splits] for _ in GROUPS]
        dist.all_to_all(outputs[0], inputs)
        flat = torch.zeros(sum(splits))
        dist.all_to_all_single(flat, torch.cat(inputs), splits, splits, group=GLOO)
        same(torch.cat(outputs[0]), flat, f"all_to_all of different sizes, {factor}")


def messages() -> None:
    after, before = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    for count in (0, 1, 5000, 100000):
        got = torch.zeros(count, 2)[:, 1]
        work = dist.irecv(got, before, tag=count)
        dist.send(torch.full((count,), float(RANK)), after, tag=count)
        work.wait()
        assert torch.equal(got, torch.full((count,), float(before)))
    # As batch_isend_irecv asks from PyTorch 2.14 on.
    assert not dist.group.WORLD._get_backend(torch.device("cpu")).supports_coalescing
    batch = [torch.zeros(3), torch.full((3,), float(RANK))]
    operations = [dist.P2POp(dist.irecv, batch[0], before), dist.P2POp(dist.isend, batch[1], after)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert batch[0][0] == before
    # In another order than they were sent in.
    if RANK == 0:
        for tag in range(5):
            dist.send(torch.tensor([float(tag)]), 1, tag=tag)
    if RANK == 1:
        for tag in reversed(range(5)):
            got = torch.zeros(1)
            dist.recv(got, 0, tag=tag)
            assert got[0] == tag
    if RANK == 0:
        senders = []
        for _ in range(SIZE - 1):
            got = torch.zeros(20000)
            source = dist.recv(got, tag=77)
            assert torch.equal(got, torch.full((20000,), float(source)))
            senders.append(source)
        assert sorted(senders) == list(range(1, SIZE))
    else:
        dist.send(torch.full((20000,), float(RANK)), 0, tag=77)
    objects = [None]
    if RANK == 0:
        dist.send_object_list([{"a": 1}], 1)
    if RANK == 1:
        dist.recv_object_list(objects, 0)
        assert objects == [{"a": 1}]


def groups() -> None:
    for _ in range(30):
        group = dist.new_group(list(range(SIZE)))
        dist.barrier(group=group)
        dist.destroy_process_group(group)
    # All ranks call, members alone take part; in the order of ranks, whatever the list says.
    outer = dist.new_group([SIZE - 1, 0])
    inner = dist.new_group([1, 2])
    parity = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])[0]
    # Last: from PyTorch 2.14 on, those that take no part count one group less, and later groups have other names there.
    reversed_ = dist.new_group([2, 1], use_local_synchronization=True) if RANK in (1, 2) else None
    for group, members in (
        (outer, [0, SIZE - 1]),
        (inner, [1, 2]),
        (reversed_, [1, 2]),
        (parity, [RANK % 2, RANK % 2 + 2]),
    ):
        if RANK not in members:
            assert group is None or dist.get_rank(group) == -1
            continue
        assert dist.get_rank(group) == members.index(RANK)
        total = torch.tensor([2.0**RANK])
        dist.all_reduce(total, group=group)
        assert total[0] == sum(2.0**rank for rank in members)
        shared = torch.tensor([float(RANK)])
        dist.broadcast(shared, members[1], group=group)
        assert shared[0] == members[1]
        dist.barrier(group=group)
        dist.destroy_process_group(group)


def overlap() -> None:
    """Many collectives in flight, finished in any order; futures; results that nobody waits for."""
    works, tensors = [], []
    for index in range(60):
        tensors.append(torch.full((1000 * (index % 7) + 1, 2), float(RANK + index)))
        works.append(dist.all_reduce(tensors[-1][:, 0], async_op=True))
    order = list(range(60))[:: 1 if RANK % 2 else -1]
    for index in order:
        if index % 3 == 0:
            assert works[index].get_future().wait()[0] is not None
        else:
            works[index].wait()
        assert works[index].is_completed()
        assert works[index].is_success()
    for index, tensor in enumerate(tensors):
        assert (tensor[:, 0] == sum(rank + index for rank in range(SIZE))).all()
        assert (tensor[:, 1] == RANK + index).all()
    seen = []
    data = torch.full((3,), float(RANK))
    future = dist.all_reduce(data, async_op=True).get_future().then(lambda done: seen.append(done.value()[0].clone()))
    future.wait()
    same(seen[0], torch.full((3,), float(sum(range(SIZE)))), "a future's value")
    # A callback may call, and wait.
    data, more = torch.full((3,), float(RANK)), torch.full((2,), float(RANK))
    future = dist.all_reduce(data, async_op=True).get_future()
    future = future.then(lambda _: dist.all_reduce(more, async_op=True).get_future().wait()[0])
    same(future.wait(), torch.full((2,), float(sum(range(SIZE)))), "what a future's callback waited for")
    # It may wait for a call that was made before it, too: a collective or a message. None is over when it is attached.
    data, tag = [torch.full((3,), float(RANK)) for _ in range(3)], 9
    if RANK > 0:
        dist.recv(torch.zeros(1), 0, tag=tag)
    first, second, third = (dist.all_reduce(its, async_op=True).get_future() for its in data)
    chain = first.then(lambda one: second.then(lambda two: third.wait()[0] + two.value()[0]).wait() + one.value()[0])
    if RANK == 0:
        for rank in range(1, SIZE):
            dist.send(torch.zeros(1), rank, tag=tag)
    same(chain.wait(), torch.full((3,), 3.0 * sum(range(SIZE))), "what a callback waited for, begun before")
    got = [torch.zeros(1), torch.zeros(1)]
    one, two = (dist.irecv(its, (RANK + 1) % SIZE, tag=tag + 1).get_future() for its in got)
    chain = one.then(lambda done: done.value()[0] + two.wait()[0])
    dist.barrier()
    for value in (1.0, 2.0):
        dist.send(torch.tensor([value]), (RANK - 1) % SIZE, tag=tag + 1)
    same(chain.wait(), torch.tensor([3.0]), "what a message's callback waited for")
    # A batch says that it is not over, and does not wait for it.
    got = torch.zeros(3, 2)[:, 0]
    with dist.distributed_c10d._coalescing_manager(device=torch.device("cpu"), async_ops=True) as batch:
        dist.irecv(got, (RANK + 1) % SIZE)
    assert not batch.works[0].is_completed()
    dist.barrier()
    dist.send(torch.full((3,), 2.0), (RANK - 1) % SIZE)
    batch.wait()
    assert (got == 2).all()
    # A posted receive is not in the way of a collective's future.
    waiting = torch.zeros(1)
    work = dist.irecv(waiting, (RANK + 1) % SIZE, tag=5)
    received = work.get_future()
    dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()
    dist.send(torch.ones(1), (RANK - 1) % SIZE, tag=5)
    received.wait()
    assert waiting[0] == 1
    left = torch.zeros(4, 2)[:, 1]
    left += RANK
    dist.all_reduce(left, async_op=True)  # dropped; the copy back to the strided tensor is done all the same
    dist.barrier()
    deadline = time.monotonic() + 10
    while left[0] != sum(range(SIZE)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (left == sum(range(SIZE))).all()


def refused() -> None:
    cases = [
        (lambda: dist.all_reduce(torch.zeros(3, dtype=torch.int16)), "a reduction by SUM of torch.int16"),
        (lambda: dist.all_reduce(torch.zeros(3, dtype=torch.float8_e4m3fn)), "float8_e4m3fn"),
        (lambda: dist.all_reduce(torch.zeros(3, dtype=torch.bool), dist.ReduceOp.AVG), "AVG of torch.bool"),
        (lambda: dist.all_reduce(torch.zeros(3, dtype=torch.int32), dist.ReduceOp.BXOR), "BXOR"),
        (lambda: dist.all_reduce(torch.zeros(3).to_sparse()), "layout torch.sparse_coo"),
        (lambda: dist.all_gather_into_tensor(torch.zeros(3), torch.zeros(3)), "times as many"),
        (lambda: dist.reduce_scatter_tensor(torch.zeros(3), torch.zeros(3)), "times as many"),
        (lambda: dist.all_gather([torch.zeros(3)] * (SIZE + 1), torch.zeros(3)), "one for each rank"),
        (lambda: dist.all_to_all_single(torch.zeros(SIZE + 1), torch.zeros(SIZE)), "parted equally"),
        (lambda: dist.all_to_all_single(torch.zeros(SIZE), torch.zeros(SIZE), [1], [1]), "one for each rank"),
        (lambda: dist.all_reduce(torch.zeros(3, device="meta")), "on meta"),
    ]
    for call, part in cases:
        with pytest.raises(Exception, match=part):
            call()
    dist.barrier()  # nothing was started


parts = {
    part.__name__: part
    for part in (reductions, coalesced, scatters, gathers, exchanges, messages, groups, overlap, refused)
}
for name in sys.argv[1:] or parts:
    parts[name]()
    dist.barrier()
dist.destroy_process_group()
# Again in the same process: MPI lives on.
dist.init_process_group("ddl")
total = torch.ones(1)
dist.all_reduce(total)
assert total[0] == SIZE
dist.destroy_process_group()
print(f"rank {RANK}: {checks} checks")
