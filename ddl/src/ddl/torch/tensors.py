"""Tensors as libddl takes them: an address, an element count and a type. The reductions that each type has."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from ddl.buffers import TYPES
from ddl.collectives import OPS
from ddl.errors import ArgumentError, UnsupportedError

_BYTE = TYPES["uint8"]
TYPES_OF_TORCH: dict[torch.dtype, int] = {getattr(torch, name): number for name, number in TYPES.items()}
OPERATIONS = {
    ReduceOp.SUM: OPS["sum"],
    ReduceOp.AVG: OPS["average"],
    ReduceOp.MIN: OPS["min"],
    ReduceOp.MAX: OPS["max"],
    ReduceOp.PRODUCT: OPS["product"],
}
# Booleans are bytes of 0 and 1: "or" is their maximum, "and" their minimum.
_OF_BOOL = {
    **dict.fromkeys((ReduceOp.SUM, ReduceOp.MAX, ReduceOp.BOR), OPS["max"]),
    **dict.fromkeys((ReduceOp.MIN, ReduceOp.PRODUCT, ReduceOp.BAND), OPS["min"]),
}


def check(tensor: Tensor) -> None:
    """Raise UnsupportedError if libddl cannot reach the tensor's memory."""
    if tensor.layout != torch.strided:
        raise UnsupportedError(
            f"backend ddl: a tensor of layout {tensor.layout} (shape {tuple(tensor.shape)}): only dense ones can be "
            "exchanged: pass Tensor.to_dense(), or make the gradients dense (Embedding(sparse=False))"
        )
    if not (tensor.is_cpu or tensor.is_cuda):
        raise UnsupportedError(
            f"backend ddl: a tensor on {tensor.device} (shape {tuple(tensor.shape)}): only those in host memory and on "
            "CUDA's GPUs can be exchanged: copy it to the CPU"
        )


def movable(tensor: Tensor) -> tuple[int, int, int]:
    """The address, count and ddl_type of a contiguous tensor's elements, for calls that only move bits."""
    kind = TYPES_OF_TORCH.get(tensor.dtype)
    if kind is None:
        return tensor.data_ptr(), tensor.nbytes, _BYTE
    return tensor.data_ptr(), tensor.numel(), kind


def reducible(tensor: Tensor, op: ReduceOp | ReduceOp.RedOpType, parts: int = 1) -> tuple[int, int, int]:
    """The count, ddl_type and ddl_op for a reduction of a contiguous tensor; the count is that of one of equal `parts`.

    Raises UnsupportedError if there is no such reduction.
    """
    name = getattr(op, "op", op)  # a ReduceOp holds the enumeration's member
    count = tensor.numel() // parts
    if tensor.dtype == torch.bool and name in _OF_BOOL:
        return count, _BYTE, _OF_BOOL[name]
    if tensor.is_complex() and name in (ReduceOp.SUM, ReduceOp.AVG):
        real = TYPES_OF_TORCH.get(tensor.dtype.to_real())
        if real is not None:
            return 2 * count, real, OPERATIONS[name]
    kind = TYPES_OF_TORCH.get(tensor.dtype)
    if kind is None or name not in OPERATIONS:
        operations = ", ".join(str(known).rpartition(".")[2] for known in OPERATIONS)
        types = ", ".join(str(known).rpartition(".")[2] for known in TYPES_OF_TORCH)
        raise UnsupportedError(
            f"backend ddl: a reduction by {str(name).rpartition('.')[2]} of {tensor.dtype} (shape "
            f"{tuple(tensor.shape)}): there are {operations} of {types}, those but AVG of bool, and SUM and AVG of "
            "complex: convert the tensor first"
        )
    return count, kind, OPERATIONS[name]


def same_size(tensors: Sequence[Tensor]) -> bool:
    """Whether all have the same number of elements."""
    return len({tensor.numel() for tensor in tensors}) == 1


def same_type(tensors: Sequence[Tensor], what: str) -> None:
    """Raise ArgumentError if two of the tensors have different types."""
    for tensor in tensors:
        if tensor.dtype != tensors[0].dtype:
            raise ArgumentError(f"{what}: tensors of {tensors[0].dtype} and {tensor.dtype}: give all the same type")


def need_one_for_each(tensors: Sequence[Tensor], size: int, what: str) -> None:
    """Raise ArgumentError unless there is one tensor for each of `size` ranks."""
    if len(tensors) != size:
        raise ArgumentError(f"{what} has {len(tensors)} tensors: it must have {size}, one for each rank")


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two contiguous tensors share memory."""
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + other.nbytes and second < first + one.nbytes and one.nbytes > 0 and other.nbytes > 0


def any_overlap(ones: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether one of `ones` shares memory with one of `others`; all are contiguous."""
    parts = [(its.data_ptr(), its.nbytes, kind) for kind, those in enumerate((ones, others)) for its in those]
    ends = [0, 0]  # of each kind, the furthest so far
    for start, nbytes, kind in sorted(parts):
        if nbytes == 0:
            continue
        if start < ends[1 - kind]:
            return True
        ends[kind] = max(ends[kind], start + nbytes)
    return False


def packed(tensor: Tensor) -> Tensor:
    """The tensor itself if its elements are contiguous and aligned; else a contiguous copy."""
    check(tensor)
    if _lies_plain(tensor):
        return tensor.detach()
    return tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def target_of(tensor: Tensor) -> Tensor:
    """Like `packed`, for a tensor that is only written: a copy is not initialised."""
    check(tensor)
    return tensor.detach() if _lies_plain(tensor) else tensor.new_empty(tensor.shape)


def _lies_plain(tensor: Tensor) -> bool:
    aligned = tensor.data_ptr() % tensor.element_size() == 0  # what a file's header shifts is not
    return aligned and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def packed_on_host(tensor: Tensor) -> Tensor:
    """Like `packed`, but in host memory, which messages need. Waits for the GPU."""
    return packed(tensor).cpu()


def target_on_host(tensor: Tensor) -> Tensor:
    """Like `target_of`, in host memory."""
    check(tensor)
    return target_of(tensor) if tensor.is_cpu else tensor.new_empty(tensor.shape, device="cpu")


def copy_back(memory: Tensor, tensor: Tensor) -> None:
    """Copy `memory` to the tensor, unless it is the tensor's own memory."""
    if memory.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(memory.view(tensor.shape))
