"""Reductions that a rank without data takes part in."""

from __future__ import annotations

import itertools

import pytest
import torch

from ddl.frontends.core.ops import Op
from ddl.horovod.torch.ops import neutral

OPS = (Op.Average, Op.Sum, Op.Min, Op.Max, Op.Product)
TYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
)


@pytest.mark.parametrize(
    ("op", "dtype"), [*itertools.product(OPS, TYPES), (Op.Average, torch.complex64), (Op.Sum, torch.complex64)]
)
def test_a_rank_without_data_changes_no_result(op: Op, dtype: torch.dtype) -> None:
    its = neutral(op, dtype, (4,), torch.device("cpu"))
    assert (its.dtype, its.shape) == (dtype, (4,))
    data = torch.tensor([0, 1, 1, 0], dtype=dtype) if dtype is torch.bool else torch.tensor([0, 1, 5, 100]).to(dtype)
    if dtype.is_floating_point:
        data = torch.cat([-data[1:2], data[:3]])
    together = torch.stack([data, its])
    reduced = {
        Op.Average: lambda: together.sum(0),
        Op.Sum: lambda: together.sum(0),
        Op.Min: lambda: together.amin(0),
        Op.Max: lambda: together.amax(0),
        Op.Product: lambda: together.prod(0),
    }[op]()
    assert torch.equal(reduced.to(dtype), data)
