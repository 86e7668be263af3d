"""Collectives of several tensors in one call, by Horovod's names. The arguments are those of the single forms."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ddl.frontends.core.handle import Handle
from ddl.frontends.core.ops import Op, chosen
from ddl.horovod.torch import starting
from ddl.horovod.torch.collectives import allgather, allreduce, reducescatter
from ddl.horovod.torch.compression import Compression, Compressor
from ddl.horovod.torch.gradients import copy_of
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
        return [allreduce(tensor, average, _name_of(name, number), *arguments) for number, tensor in enumerate(tensors)]
    pairs = [compression.compress(tensor) for tensor in tensors]
    how = Reduction(chosen(average, op), prescale_factor, postscale_factor, process_set)
    handle = starting.reduce_in_place([copy_of(small) for small, _ in pairs], how, _name_of(name))
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
    copies = [copy_of(tensor) for tensor in tensors]
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
    return starting.reduce_in_place(tensors, how, _name_of(name)).in_background()


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """`allgather` of each tensor."""
    if any(tensor.requires_grad for tensor in tensors):
        return [allgather(tensor, _name_of(name, number), process_set) for number, tensor in enumerate(tensors)]
    return starting.gather(tensors, process_set, _name_of(name)).wait()


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle[list[Tensor]]:
    """`grouped_allgather` that returns at once."""
    return starting.gather(tensors, process_set, _name_of(name)).in_background()


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
    arguments = (compression, op, process_set, prescale_factor, postscale_factor)
    return [reducescatter(tensor, _name_of(name, number), *arguments) for number, tensor in enumerate(tensors)]


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: Op = Op.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle[list[Tensor]]:
    """`grouped_reducescatter` that returns at once."""
    how = Reduction(op, prescale_factor, postscale_factor, process_set)
    return starting.scatter_reduced(tensors, how, _name_of(name)).in_background()


def _name_of(name: str | None, number: int | None = None) -> str | None:
    """That of a group, or of one of its tensors: others than those of calls of one tensor."""
    if name is None:
        return None
    return f"{name} (a group)" if number is None else f"{name} (tensor {number} of a group)"
