"""Collectives of one tensor, by Horovod's names.

`allreduce(tensor)` returns a new tensor, `allreduce_(tensor)` works in place; the forms with `async` return a `Handle`,
which `synchronize` turns into the result. Gradients flow through the forms that block and are not in place. Every rank
of `process_set` makes the same calls in the same order; `name` is accepted and ignored.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

from ddl.horovod.torch import starting
from ddl.horovod.torch.compression import Compression, Compressor
from ddl.horovod.torch.handle import Handle, poll, synchronize
from ddl.horovod.torch.ops import Op, Sum, chosen
from ddl.horovod.torch.process_sets import ProcessSet, global_process_set

__all__ = [
    "Handle",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "synchronize",
]


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """`tensor` reduced over all ranks, by default averaged; the same bits on every rank."""
    small, context = compression.compress(tensor)
    reduced = _applied(_Allreduce, small, chosen(average, op), prescale_factor, postscale_factor, process_set)
    return compression.decompress(reduced, context)


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[Tensor]:
    """`allreduce` that returns at once."""
    return allreduce_async_(_copy(tensor), average, name, op, prescale_factor, postscale_factor, process_set)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce `tensor` in place, and return it."""
    return allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set).wait()


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[Tensor]:
    """`allreduce_` that returns at once."""
    return _first(
        starting.reduce_in_place([tensor], chosen(average, op), prescale_factor, postscale_factor, process_set)
    )


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op = Op.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """This rank's rows of the reduced `tensor`; where they cannot be parted equally, the first ranks get one more."""
    small, context = compression.compress(tensor)
    reduced = _applied(_ReduceScatter, small, op, prescale_factor, postscale_factor, process_set)
    return compression.decompress(reduced, context)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: Op = Op.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[Tensor]:
    """`reducescatter` that returns at once."""
    return _first(starting.scatter_reduced([tensor], op, prescale_factor, postscale_factor, process_set))


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Everyone's rows, in the order of ranks. Ranks may have different numbers of rows."""
    return _applied(_Allgather, tensor, process_set)


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[Tensor]:
    """`allgather` that returns as soon as every rank has said how many rows it has."""
    return _first(starting.gather([tensor], process_set))


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The root's `tensor`, on every rank. `root_rank` counts all ranks, not those of the set."""
    return _applied(_Broadcast, tensor, root_rank, process_set)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[Tensor]:
    """`broadcast` that returns at once."""
    return broadcast_async_(_copy(tensor), root_rank, name, process_set)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Copy the root's `tensor` over everyone's, and return it."""
    return broadcast_async_(tensor, root_rank, name, process_set).wait()


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[Tensor]:
    """`broadcast_` that returns at once."""
    return _first(starting.broadcast_in_place([tensor], root_rank, process_set))


@overload
def alltoall(
    tensor: Tensor, splits: None = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor: ...
@overload
def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, Tensor]: ...
def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Rows of `tensor` to each rank: `splits[r]` to rank r, or to each as many. Returns everyone's for this rank.

    With `splits` also how many rows each rank has sent.
    """
    received: Tensor
    rows: Tensor
    received, rows = _Alltoall.apply(tensor, _numbers(splits), process_set)  # type: ignore[no-untyped-call]
    return received if splits is None else (received, rows)


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[Tensor] | Handle[tuple[Tensor, Tensor]]:
    """`alltoall` that returns as soon as every rank has said how much it sends."""
    handle = starting.exchange_rows(tensor, _numbers(splits), process_set)
    if splits is None:
        return Handle(handle.work, lambda: handle.wait()[0])

    def both() -> tuple[Tensor, Tensor]:
        received, rows = handle.wait()
        return received, torch.tensor(rows, dtype=torch.int32)

    return Handle(handle.work, both)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank has called it."""
    process_set.group.barrier().wait()


def join() -> int:
    """Wait until every rank has called it; returns the one that was the last (by its host's clock).

    Every rank must have made as many calls before: where one goes on with an allreduce, both get a MismatchError that
    names them. Horovod lets ranks with less data answer the others' calls with zeros; here, share the data evenly.
    """
    now = torch.tensor([time.time_ns()])
    handle = starting.gather([now], global_process_set)
    return int(torch.argmax(handle.wait()[0]))


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, tensor: Tensor, op: Op, prescale: float, postscale: float, process_set: ProcessSet
    ) -> Tensor:
        context.arguments = (op, prescale, postscale, process_set)
        return starting.reduce_in_place([_copy(tensor)], op, prescale, postscale, process_set).wait()[0]

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        op, *others = context.arguments
        _need_linear(op)
        return (starting.reduce_in_place([_copy(gradient)], op, *others).wait()[0], None, None, None, None)


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, tensor: Tensor, op: Op, prescale: float, postscale: float, process_set: ProcessSet
    ) -> Tensor:
        context.arguments = (op, prescale * postscale, process_set)
        return starting.scatter_reduced([tensor], op, prescale, postscale, process_set).wait()[0]

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        op, factor, process_set = context.arguments
        _need_linear(op)
        if op is Op.Average:
            factor /= process_set.size()
        every = starting.gather([gradient], process_set).wait()[0]
        return (every * factor, None, None, None, None)


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, process_set: ProcessSet) -> Tensor:
        context.process_set = process_set
        context.rows = tensor.shape[0] if tensor.dim() else 1
        return starting.gather([tensor], process_set).wait()[0]

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        process_set = context.process_set
        rows = starting.gather([torch.tensor([context.rows])], process_set).wait()[0].tolist()
        total = starting.reduce_in_place([_copy(gradient)], Sum, 1, 1, process_set).wait()[0]
        first = sum(rows[: process_set.rank()])
        return (total[first : first + context.rows], None)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: Tensor, root: int, process_set: ProcessSet) -> Tensor:
        context.arguments = (root, process_set)
        return starting.broadcast_in_place([_copy(tensor)], root, process_set).wait()[0]

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        root, process_set = context.arguments
        total = starting.reduce_in_place([_copy(gradient)], Sum, 1, 1, process_set).wait()[0]
        keeps = process_set.number_of(root) == process_set.rank()
        return (total if keeps else torch.zeros_like(total), None, None)


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, tensor: Tensor, splits: list[int] | None, process_set: ProcessSet
    ) -> tuple[Tensor, Tensor]:
        received, rows = starting.exchange_rows(tensor, splits, process_set).wait()
        context.arguments = (rows, process_set)
        sent = torch.tensor(rows, dtype=torch.int32)
        context.mark_non_differentiable(sent)
        return received, sent

    @staticmethod
    def backward(context: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return (starting.exchange_rows(gradient, *context.arguments).wait()[0], None, None)


def _applied(function: type[torch.autograd.Function], *arguments: object) -> Tensor:
    result: Tensor = function.apply(*arguments)
    return result


def _need_linear(op: Op) -> None:
    if op not in (Op.Average, Op.Sum):
        raise RuntimeError(f"no gradient flows through a reduction by {op.name}: only through Average and Sum")


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _first(handle: Handle[list[Tensor]]) -> Handle[Tensor]:
    return Handle(handle.work, lambda: handle.wait()[0])


def _numbers(splits: Tensor | Sequence[int] | None) -> list[int] | None:
    if splits is None:
        return None
    return [int(number) for number in (splits.tolist() if isinstance(splits, Tensor) else splits)]
