"""Collectives in flight over one or several tensors, by the process group of a set of ranks.

What Horovod's functions have in common: they are announced, and begin when every rank has announced the same; scaling,
results of their own, and first dimensions that differ from rank to rank. Nothing is written before every rank has
announced the call with the same types and shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import ReduceOp

from ddl.frontends.core import rows
from ddl.frontends.core.announcements import Announcement
from ddl.frontends.core.handle import Handle
from ddl.frontends.core.ops import Op
from ddl.frontends.core.ops import Reduction as AnyReduction
from ddl.frontends.core.process_sets import ProcessSet as AnyProcessSet
from ddl.horovod.torch.ops import neutral, of_torch
from ddl.torch.process_group import ProcessGroup
from ddl.torch.tensors import check, reducible
from ddl.torch.work import Work

_ON_GPU = "on a GPU"

ProcessSet: TypeAlias = AnyProcessSet[ProcessGroup]
Reduction: TypeAlias = AnyReduction[ProcessSet]
Announced = Mapping[int, Announcement]
ResultT = TypeVar("ResultT")


def reduce_in_place(
    tensors: Sequence[Tensor],
    how: Reduction,
    name: str | None = None,
    terms: str = "",
    per_rank: tuple[int, ...] = (),
    on_announced: Callable[[Announced], None] | None = None,
) -> Handle[list[Tensor]]:
    """Reduce each tensor over the ranks.

    `terms`: what else must be the same on every rank; `per_rank`: what each tells the others,
    which `on_announced` gets.
    """
    group, op = how.process_set.group, ReduceOp(of_torch(how.op))
    results = list(tensors)
    _check_reducible(results, how)

    def start(announced: Announced, awaited: bool) -> Work:
        if on_announced is not None:
            on_announced(announced)
        for tensor in results:
            scale(tensor, how.prescale, "prescale_factor")
        return reduce_now(results, op, group, awaited)

    def finish() -> list[Tensor]:
        for tensor in results:
            scale(tensor, how.postscale, "postscale_factor")
        return results

    return _announced("allreduce", name, results, how.process_set, start, finish, how.terms(terms), per_rank)


def reduce_now(tensors: Sequence[Tensor], op: ReduceOp, group: ProcessGroup, awaited: bool = False) -> Work:
    """Start an allreduce that every rank has announced. `awaited`: it may block."""
    options = dist.AllreduceOptions()
    options.asyncOp = not awaited
    options.reduceOp = op
    with torch.no_grad():
        return group.allreduce([tensor.detach() for tensor in tensors], options)


def answer(announcement: Announcement, group: ProcessGroup, device: int) -> Work:
    """Take part in an allreduce that other ranks announced, with tensors that leave their results as they are.

    `device`: the GPU that they are made on if the others' are on one.
    """
    terms = announcement.terms.split(", ")
    op = Op[terms[0]]
    where = torch.device("cpu")
    if terms[-1] == _ON_GPU:
        where = torch.device("cuda", device)
    tensors = [neutral(op, getattr(torch, dtype), shape, where) for dtype, shape in announcement.tensors]
    return reduce_now(tensors, ReduceOp(of_torch(op)), group)


def scatter_reduced(tensors: Sequence[Tensor], how: Reduction, name: str | None = None) -> Handle[list[Tensor]]:
    """Reduce each tensor, and keep this rank's rows: as many as the others', the first ranks one more."""
    options = dist.ReduceScatterOptions()
    options.reduceOp = ReduceOp(of_torch(how.op))
    group, size = how.process_set.group, how.process_set.size()
    _check_reducible(tensors, how)
    inputs, outputs = [], []
    for tensor in tensors:
        parts = rows.shares(rows.rows_of(tensor.shape, "reducescatter"), size)
        copy = tensor.detach().clone(memory_format=torch.contiguous_format)
        scale(copy, how.prescale, "prescale_factor")
        inputs.append(list(copy.split(parts)))
        outputs.append(tensor.new_empty((parts[group.rank()], *tensor.shape[1:])))

    def finish() -> list[Tensor]:
        for tensor in outputs:
            scale(tensor, how.postscale, "postscale_factor")
        return outputs

    def start(_: Announced, awaited: bool) -> Work:
        options.asyncOp = not awaited
        return group.reduce_scatter(outputs, inputs, options)

    return _announced("reducescatter", name, tensors, how.process_set, start, finish, how.terms())


def gather(tensors: Sequence[Tensor], process_set: ProcessSet, name: str | None = None) -> Handle[list[Tensor]]:
    """Everyone's rows of each tensor."""
    group, size = process_set.group, process_set.size()
    for tensor in tensors:
        rows.rows_of(tensor.shape, "allgather")
    inputs = [tensor.detach() for tensor in tensors]
    outputs: list[Tensor] = []

    def start(announced: Announced, awaited: bool) -> Work:
        options = AllgatherOptions()
        options.asyncOp = not awaited
        counts = [[announced[rank].tensors[index][1][0] for rank in range(size)] for index in range(len(inputs))]
        outputs.extend(its.new_empty((sum(each), *its.shape[1:])) for its, each in zip(inputs, counts, strict=True))
        if all(len(set(each)) == 1 for each in counts):
            return group.all_gather_single_coalesced(outputs, inputs, options)
        targets = [list(output.split(each)) for output, each in zip(outputs, counts, strict=True)]
        return group.allgather(targets, inputs, options)

    return _announced("allgather", name, tensors, process_set, start, lambda: outputs)


def broadcast_in_place(
    tensors: Sequence[Tensor], root_rank: int, process_set: ProcessSet, name: str | None = None
) -> Handle[list[Tensor]]:
    """The root's tensors over everyone's. `root_rank` is its number among all ranks."""
    options = dist.BroadcastOptions()
    options.rootRank = process_set.number_of(root_rank)
    group = process_set.group
    results = list(tensors)

    def start(_: Announced, awaited: bool) -> Work:
        options.asyncOp = not awaited
        return group.broadcast([tensor.detach() for tensor in results], options)

    return _announced("broadcast", name, results, process_set, start, lambda: results, f"root {root_rank}")


def exchange_rows(
    tensor: Tensor, splits: Sequence[int] | None, process_set: ProcessSet, name: str | None = None
) -> Handle[tuple[Tensor, list[int]]]:
    """Rows of `tensor` to each rank, as many as `splits` says; everyone's for this rank, and how many each sent."""
    group = process_set.group
    size = process_set.size()
    sent = rows.splits_of(splits, rows.rows_of(tensor.shape, "alltoall"), size)
    results: list[tuple[Tensor, list[int]]] = []

    def start(announced: Announced, _: bool) -> Work:
        received = [announced[rank].per_rank[group.rank()] for rank in range(size)]
        output = tensor.new_empty((sum(received), *tensor.shape[1:]))
        results.append((output, received))
        return group.all_to_all_single(output, tensor.detach(), received, sent)

    return _announced("alltoall", name, [tensor], process_set, start, lambda: results[0], per_rank=tuple(sent))


def scale(tensor: Tensor, factor: float, what: str) -> None:
    """Multiply in place, whole numbers in double precision and rounded towards zero. Raises ValueError for bool."""
    _check_scale(tensor, factor, what)
    if factor == 1:
        return
    with torch.no_grad():
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.mul_(factor)
        else:
            tensor.copy_(tensor.double().mul_(factor))


def _announced(
    kind: str,
    name: str | None,
    tensors: Sequence[Tensor],
    process_set: ProcessSet,
    start: Callable[[Announced, bool], Work],
    finish: Callable[[], ResultT],
    terms: str = "",
    per_rank: tuple[int, ...] = (),
) -> Handle[ResultT]:
    for tensor in tensors:
        check(tensor)
    gpu = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    if gpu is not None:
        # Another thread may begin it: on the stream that has written the tensors.
        stream, begin = torch.cuda.current_stream(gpu), start

        def start(announced: Announced, awaited: bool) -> Work:
            with torch.cuda.stream(stream):
                return begin(announced, awaited)

        terms = f"{terms}, {_ON_GPU}" if terms else _ON_GPU
    described = tuple((_name_of(tensor.dtype), tuple(tensor.shape)) for tensor in tensors)
    call = process_set.negotiator.announce(kind, name, start, described, terms, per_rank)
    return Handle(call, finish)


@functools.cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).rpartition(".")[2]


def _check_reducible(tensors: Sequence[Tensor], how: Reduction) -> None:
    for tensor in tensors:
        check(tensor)
        for name, factor in how.factors:
            _check_scale(tensor, factor, f"{name}_factor")
        reducible(tensor, of_torch(how.op))


def _check_scale(tensor: Tensor, factor: float, what: str) -> None:
    if factor != 1 and tensor.dtype is torch.bool:
        raise ValueError(f"{what} is {factor}, but a tensor of {tensor.dtype} cannot be scaled: convert it first")
