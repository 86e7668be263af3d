"""Collectives of several tensors in one call, by Horovod's names. The arguments are those of the single forms."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ddl.horovod.torch import starting
from ddl.horovod.torch.collectives import allgather, allreduce, reducescatter
from ddl.horovod.torch.compression import Compression, Compressor
from ddl.horovod.torch.handle import Handle
from ddl.horovod.torch.ops import Op, chosen
from ddl.horovod.torch.process_sets import ProcessSet, global_process_set
from ddl.horovod.torch.starting import Reduction


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """`allreduce` of each tensor."""
    if any(tensor.requires_grad for tensor in tensors):  # one by one, so that gradients flow
        arguments = (compression, op, prescale_factor, postscale_factor, process_set)
        return [allreduce(tensor, average, name, *arguments) for tensor in tensors]
    pairs = [compression.compress(tensor) for tensor in tensors]
    handle = grouped_allreduce_async(
        [small for small, _ in pairs], average, name, op, prescale_factor, postscale_factor, process_set
    )
    return [
        compression.decompress(reduced, context) for reduced, (_, context) in zip(handle.wait(), pairs, strict=True)
    ]


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[Tensor]]:
    """`grouped_allreduce` that returns at once."""
    copies = [tensor.detach().clone() for tensor in tensors]
    return grouped_allreduce_async_(copies, average, name, op, prescale_factor, postscale_factor, process_set)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce each tensor in place, and return them."""
    return grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set).wait()


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle[list[Tensor]]:
    """`grouped_allreduce_` that returns at once."""
    how = Reduction(chosen(average, op), prescale_factor, postscale_factor, process_set)
    return starting.reduce_in_place(tensors, how)


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """`allgather` of each tensor."""
    if any(tensor.requires_grad for tensor in tensors):
        return [allgather(tensor, name, process_set) for tensor in tensors]
    return grouped_allgather_async(tensors, name, process_set).wait()


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[list[Tensor]]:
    """`grouped_allgather` that returns as soon as every rank has said how many rows it has."""
    return starting.gather(tensors, process_set)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op = Op.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """`reducescatter` of each tensor."""
    arguments = (name, compression, op, process_set, prescale_factor, postscale_factor)
    return [reducescatter(tensor, *arguments) for tensor in tensors]


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: Op = Op.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[list[Tensor]]:
    """`grouped_reducescatter` that returns at once."""
    return starting.scatter_reduced(tensors, Reduction(op, prescale_factor, postscale_factor, process_set))
