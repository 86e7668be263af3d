"""Collectives of one tensor, by Horovod's names.

`allreduce(tensor)` returns a new tensor, `allreduce_(tensor)` works in place; the forms with `async` return a `Handle`,
which `synchronize` turns into the result. Gradients flow through the forms that block and are not in place.

Every rank of `process_set` makes the same calls: those with a `name` in any order, those without one in the same order.
A name stands for one call of its kind at a time, else it is an ArgumentError (a ValueError). If ranks make a call with
other types, shapes, operations or roots, each of them gets a MismatchError. If a rank makes other calls but not this
one within DDL_TIMEOUT seconds, those that did get a RankTimeoutError that names it, and so does that rank if it makes
the call later. These errors leave the tensors alone, and the job goes on.

If a rank makes no call at all for DDL_TIMEOUT seconds, the RankTimeoutError ends all calls of the process set: the job
does not go on. So does an exception in the midst of a call (KeyboardInterrupt), with a StateError; the other ranks then
get a ShutdownError at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

from ddl.frontends.core.handle import Handle
from ddl.frontends.core.ops import Op, chosen
from ddl.horovod.torch import gradients, starting
from ddl.horovod.torch.compression import Compression, Compressor
from ddl.horovod.torch.gradients import copy_of
from ddl.horovod.torch.process_sets import ProcessSet, global_process_set
from ddl.horovod.torch.starting import Reduction


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
    how = Reduction(chosen(average, op), prescale_factor, postscale_factor, process_set)
    return compression.decompress(gradients.allreduce(small, how, name), context)


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
    return allreduce_async_(copy_of(tensor), average, name, op, prescale_factor, postscale_factor, process_set)


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
    return _reduction(tensor, average, name, op, prescale_factor, postscale_factor, process_set).wait()


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
    return _reduction(tensor, average, name, op, prescale_factor, postscale_factor, process_set).in_background()


def _reduction(
    tensor: Tensor,
    average: bool | None,
    name: str | None,
    op: Op | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> Handle[Tensor]:
    how = Reduction(chosen(average, op), prescale, postscale, process_set)
    return starting.reduce_in_place([tensor], how, name).then(_only)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op = Op.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """This rank's rows of the reduced `tensor`. If they do not divide evenly, the first ranks get one more."""
    small, context = compression.compress(tensor)
    how = Reduction(op, prescale_factor, postscale_factor, process_set)
    return compression.decompress(gradients.reduce_scatter(small, how, name), context)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: Op = Op.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[Tensor]:
    """`reducescatter` that returns at once."""
    how = Reduction(op, prescale_factor, postscale_factor, process_set)
    return starting.scatter_reduced([tensor], how, name).then(_only).in_background()


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Everyone's rows, in the order of ranks. Ranks may have different numbers of rows."""
    return gradients.allgather(tensor, process_set, name)


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[Tensor]:
    """`allgather` that returns at once."""
    return starting.gather([tensor], process_set, name).then(_only).in_background()


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The root's `tensor`, on every rank. `root_rank` counts all ranks, not those of the set."""
    return gradients.broadcast(tensor, root_rank, process_set, name)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[Tensor]:
    """`broadcast` that returns at once."""
    return broadcast_async_(copy_of(tensor), root_rank, name, process_set)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Copy the root's `tensor` over everyone's, and return it."""
    return starting.broadcast_in_place([tensor], root_rank, process_set, name).wait()[0]


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[Tensor]:
    """`broadcast_` that returns at once."""
    return starting.broadcast_in_place([tensor], root_rank, process_set, name).then(_only).in_background()


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
    received, rows = gradients.alltoall(tensor, _numbers(splits), process_set, name)
    return received if splits is None else (received, rows)


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle[tuple[Tensor, Tensor]]:
    """`alltoall` that returns at once.

    Its result are the rows and how many of them each rank has sent, without `splits`, too.
    """

    def both(result: tuple[Tensor, list[int]]) -> tuple[Tensor, Tensor]:
        received, rows = result
        return received, torch.tensor(rows, dtype=torch.int32)

    return starting.exchange_rows(tensor, _numbers(splits), process_set, name).then(both).in_background()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return when every rank has called it."""
    process_set.meet("barrier")


def _only(tensors: list[Tensor]) -> Tensor:
    return tensors[0]


def _numbers(splits: Tensor | Sequence[int] | None) -> list[int] | None:
    if splits is None:
        return None
    return [int(number) for number in (splits.tolist() if isinstance(splits, Tensor) else splits)]
