"""Reductions in PyTorch's terms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from ddl.frontends.core.ops import Op, check

_OF_TORCH = {
    Op.Average: ReduceOp.AVG,
    Op.Sum: ReduceOp.SUM,
    Op.Min: ReduceOp.MIN,
    Op.Max: ReduceOp.MAX,
    Op.Product: ReduceOp.PRODUCT,
}


def of_torch(op: Op) -> ReduceOp.RedOpType:
    """As torch.distributed calls it. Raises UnsupportedError for Adasum, ValueError for what is no Op."""
    check(op)
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
