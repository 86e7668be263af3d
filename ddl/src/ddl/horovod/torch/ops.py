"""The reductions, by Horovod's names."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from ddl.errors import UnsupportedError


class Op(enum.Enum):
    """A reduction over ranks, element by element."""

    Average = "average"
    Sum = "sum"
    Min = "min"
    Max = "max"
    Product = "product"
    Adasum = "adasum"  # a name that scripts mention; using it is an error


Average, Sum, Min, Max, Product, Adasum = Op.Average, Op.Sum, Op.Min, Op.Max, Op.Product, Op.Adasum

_OF_TORCH = {
    Op.Average: ReduceOp.AVG,
    Op.Sum: ReduceOp.SUM,
    Op.Min: ReduceOp.MIN,
    Op.Max: ReduceOp.MAX,
    Op.Product: ReduceOp.PRODUCT,
}


def chosen(average: bool | None, op: Op | None) -> Op:
    """What the old argument `average` and its successor `op` say together; the average where both are None.

    Raises ValueError where both are given.
    """
    if average is not None and op is not None:
        raise ValueError(f"average={average} and op={op.name} were both given: leave out average, which op replaced")
    if op is not None:
        return op
    return Op.Sum if average is False else Op.Average


def of_torch(op: Op) -> ReduceOp.RedOpType:
    """As torch.distributed calls it. Raises UnsupportedError for Adasum, ValueError for what is no Op."""
    if op is Op.Adasum:
        raise UnsupportedError("op=Adasum: DDL has no Adasum; use op=Average with a learning rate scaled by size()")
    if op not in _OF_TORCH:
        raise ValueError(f"op is {op!r}: allowed are {', '.join(known.name for known in _OF_TORCH)} of this module")
    return _OF_TORCH[op]


def neutral(op: Op, dtype: torch.dtype, shape: Sequence[int], device: torch.device) -> Tensor:
    """A tensor that leaves the others of a reduction as they are: zeros for a sum."""
    return torch.full(tuple(shape), _neutral(op, dtype), dtype=dtype, device=device)


def _neutral(op: Op, dtype: torch.dtype) -> float:
    if op is Op.Product:
        return 1
    if op not in (Op.Min, Op.Max):
        return 0
    if dtype.is_floating_point:
        return float("inf") if op is Op.Min else float("-inf")
    if dtype is torch.bool:
        return op is Op.Min
    return torch.iinfo(dtype).max if op is Op.Min else torch.iinfo(dtype).min
