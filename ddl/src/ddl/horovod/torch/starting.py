"""Collectives in flight over one or several tensors, by the process group of a set of ranks.

What Horovod's functions have in common: scaling, results of their own, and first dimensions that differ from rank to
rank. `name` is of no use here: calls are matched by their order, and libddl says which ranks called something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from ddl.horovod.torch.handle import Handle
from ddl.horovod.torch.ops import Op, of_torch
from ddl.horovod.torch.process_sets import ProcessSet
from ddl.torch.process_group import ProcessGroup

_DIMENSIONS = 8  # of a shape, that ranks compare


class Reduction(NamedTuple):
    """How tensors are reduced over the ranks of a set. They are multiplied by the factors before and after."""

    op: Op
    prescale: float
    postscale: float
    process_set: ProcessSet


def reduce_in_place(
    tensors: Sequence[Tensor], how: Reduction, group: ProcessGroup | None = None
) -> Handle[list[Tensor]]:
    """Reduce each tensor over the ranks. `group`: another one of the set."""
    options = dist.AllreduceOptions()
    options.reduceOp = ReduceOp(of_torch(how.op))
    group = group or how.process_set.group
    results = list(tensors)
    _check_scale(results, how.prescale, "prescale_factor")  # all of them, before the first is changed
    _check_scale(results, how.postscale, "postscale_factor")
    for tensor in results:
        scale(tensor, how.prescale, "prescale_factor")
    with torch.no_grad():
        work = group.allreduce([tensor.detach() for tensor in results], options)

    def finish() -> list[Tensor]:
        for tensor in results:
            scale(tensor, how.postscale, "postscale_factor")
        return results

    return Handle(work, finish)


def scatter_reduced(tensors: Sequence[Tensor], how: Reduction) -> Handle[list[Tensor]]:
    """Reduce each tensor, and keep this rank's rows: as many as the others', the first ranks one more."""
    options = dist.ReduceScatterOptions()
    options.reduceOp = ReduceOp(of_torch(how.op))
    group, size = how.process_set.group, how.process_set.size()
    inputs, outputs = [], []
    for tensor in tensors:
        rows = _rows_of(tensor, "reducescatter")
        each, more = divmod(rows, size)
        parts = [each + (rank < more) for rank in range(size)]
        copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        scale(copy, how.prescale, "prescale_factor")
        inputs.append(list(copy.split(parts)))
        outputs.append(tensor.new_empty((parts[group.rank()], *tensor.shape[1:])))
    _check_scale(outputs, how.postscale, "postscale_factor")
    work = group.reduce_scatter(outputs, inputs, options)

    def finish() -> list[Tensor]:
        for tensor in outputs:
            scale(tensor, how.postscale, "postscale_factor")
        return outputs

    return Handle(work, finish)


def gather(
    tensors: Sequence[Tensor], process_set: ProcessSet, group: ProcessGroup | None = None
) -> Handle[list[Tensor]]:
    """Everyone's rows of each tensor; waits until every rank has said how many it has. `group`: as above."""
    group = group or process_set.group
    outputs, counts = [], []
    for tensor in tensors:
        _rows_of(tensor, "allgather")
    described = exchange([number for tensor in tensors for number in _shape(tensor)], group)
    for index, tensor in enumerate(tensors):
        shapes = [its[index * (_DIMENSIONS + 1) : (index + 1) * (_DIMENSIONS + 1)] for its in described]
        _need_same_rows(shapes, "allgather", process_set)
        counts.append([its[1] for its in shapes])
        outputs.append(tensor.new_empty((sum(counts[-1]), *tensor.shape[1:])))
    inputs = [tensor.detach() for tensor in tensors]
    if all(len(its) == 1 for its in map(set, counts)):
        work = group.all_gather_single_coalesced(outputs, inputs)
    else:
        targets = [list(output.split(rows)) for output, rows in zip(outputs, counts, strict=True)]
        work = group.allgather(targets, inputs)
    return Handle(work, lambda: outputs)


def broadcast_in_place(tensors: Sequence[Tensor], root_rank: int, process_set: ProcessSet) -> Handle[list[Tensor]]:
    """The root's tensors over everyone's. `root_rank` is its number among all ranks."""
    options = dist.BroadcastOptions()
    options.rootRank = process_set.number_of(root_rank)
    results = list(tensors)
    work = process_set.group.broadcast([tensor.detach() for tensor in results], options)
    return Handle(work, lambda: results)


def exchange_rows(
    tensor: Tensor, splits: Sequence[int] | None, process_set: ProcessSet
) -> Handle[tuple[Tensor, list[int]]]:
    """Rows of `tensor` to each rank, as many as `splits` says; everyone's for this rank, and how many each sent."""
    group = process_set.group
    size, rows = process_set.size(), _rows_of(tensor, "alltoall")
    if splits is None:
        if rows % size != 0:
            raise ValueError(f"alltoall: {rows} rows cannot be parted equally over {size} ranks: give splits")
        splits = [rows // size] * size
    if len(splits) != size or sum(splits) != rows or min(splits) < 0:
        raise ValueError(
            f"alltoall: splits is {list(splits)}: it must have {size} sizes, one for each rank, whose sum is {rows}, "
            "the rows of the tensor"
        )
    described = exchange([*_shape(tensor), *splits], group)
    _need_same_rows([its[: _DIMENSIONS + 1] for its in described], "alltoall", process_set)
    received = [its[_DIMENSIONS + 1 + group.rank()] for its in described]
    output = tensor.new_empty((sum(received), *tensor.shape[1:]))
    work = group.all_to_all_single(output, tensor.detach(), received, list(splits))
    return Handle(work, lambda: (output, received))


def scale(tensor: Tensor, factor: float, what: str) -> None:
    """Multiply in place, whole numbers in double precision and rounded towards zero. Raises ValueError for bool."""
    _check_scale([tensor], factor, what)
    if factor == 1:
        return
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.mul_(factor)
        else:
            tensor.copy_(tensor.double().mul_(factor))


def _check_scale(tensors: Sequence[Tensor], factor: float, what: str) -> None:
    for tensor in tensors:
        if factor != 1 and tensor.dtype is torch.bool:
            raise ValueError(f"{what} is {factor}, but a tensor of {tensor.dtype} cannot be scaled: convert it first")


def _rows_of(tensor: Tensor, what: str) -> int:
    if tensor.dim() == 0:
        raise ValueError(f"{what} of a tensor without dimensions: it has no rows; pass tensor.reshape(1)")
    return tensor.shape[0]


def _shape(tensor: Tensor) -> list[int]:
    dimensions = list(tensor.shape[:_DIMENSIONS])
    return [tensor.dim(), *dimensions, *[0] * (_DIMENSIONS - len(dimensions))]


def _need_same_rows(shapes: list[list[int]], what: str, process_set: ProcessSet) -> None:
    for rank, shape in enumerate(shapes):
        if (shape[0], shape[2:]) != (shapes[0][0], shapes[0][2:]):
            first, other = (tuple(its[1 : 1 + min(its[0], _DIMENSIONS)]) for its in (shapes[0], shape))
            raise ValueError(
                f"{what}: rank {process_set.ranks[rank]} has a tensor of shape {other}, but rank "
                f"{process_set.ranks[0]} one of {first}: all dimensions but the first must be the same"
            )


def exchange(numbers: list[int], group: ProcessGroup) -> list[list[int]]:
    """Everyone's numbers; as many on each rank. Blocks."""
    every = torch.empty(group.size(), len(numbers), dtype=torch.int64)
    group.all_gather_single(every, torch.tensor(numbers, dtype=torch.int64)).wait()
    return [[int(number) for number in row] for row in every.tolist()]
