"""What a rank that has joined is told of the others' calls."""

from __future__ import annotations

import itertools
import pickle

import pytest
import torch

from ddl.horovod.torch.call_log import Call, CallLog
from ddl.horovod.torch.ops import Op

OPS = (Op.Average, Op.Sum, Op.Min, Op.Max, Op.Product)
TYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
)


@pytest.mark.parametrize(
    ("op", "dtype"), [*itertools.product(OPS, TYPES), (Op.Average, torch.complex64), (Op.Sum, torch.complex64)]
)
def test_a_rank_without_data_changes_no_result(op: Op, dtype: torch.dtype) -> None:
    told: Call = pickle.loads(pickle.dumps(Call("allreduce", op, ((dtype, 4), (torch.int64, 0)))))
    neutral, empty = told.neutral(torch.device("cpu"))
    assert (neutral.dtype, neutral.shape, empty.shape) == (dtype, (4,), (0,))
    data = torch.tensor([0, 1, 1, 0], dtype=dtype) if dtype is torch.bool else torch.tensor([0, 1, 5, 100]).to(dtype)
    if dtype.is_floating_point:
        data = torch.cat([-data[1:2], data[:3]])
    together = torch.stack([data, neutral])
    reduced = {
        Op.Average: lambda: together.sum(0),
        Op.Sum: lambda: together.sum(0),
        Op.Min: lambda: together.amin(0),
        Op.Max: lambda: together.amax(0),
        Op.Product: lambda: together.prod(0),
    }[op]()
    assert torch.equal(reduced.to(dtype), data)


def test_the_last_calls_are_remembered_with_their_numbers() -> None:
    log = CallLog(remembered=3)
    calls = [Call(str(number)) for number in range(5)]
    assert [log.add(call) for call in calls] == list(range(5))
    assert log.since(3) == [(3, calls[3]), (4, calls[4])]
    assert log.since(0) == [(number, calls[number]) for number in (2, 3, 4)]  # two are forgotten: the asker sees it
    assert log.since(5) == []
