"""Calls of NumPy arrays by name, as front ends make them, compared with NumPy."""

from __future__ import annotations

import numpy as np
import pytest

import ddl
from ddl.frontends.core import calls
from ddl.frontends.core.calls import ArraySlot, Called, HostGroup, HostProcessSet, HostProcessSets

sets = HostProcessSets(HostProcessSet, HostGroup, calls.answer)
ddl.init()
sets.begin()
RANK, SIZE = sets.rank(), sets.size()
TYPES = ("float16", "float32", "float64", "int8", "int32", "int64", "uint8")
MOVABLE = (*TYPES, "bool", "int16", "uint16", "complex64", "uint64")


def of(rank: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    numbers = np.random.default_rng([rank, *shape]).integers(0, 3, shape)
    return numbers.astype(dtype)


def run(kind: str, *arrays: np.ndarray, **options: object) -> list[np.ndarray]:
    return calls.run(arrays, Called(kind, **options), sets)


def reductions() -> None:
    functions = {"Sum": np.sum, "Min": np.min, "Max": np.max, "Product": np.prod}
    for dtype in TYPES:
        for shape in ((), (0,), (5,), (3, 7)):
            every = np.stack([of(rank, shape, dtype) for rank in range(SIZE)])
            for op, function in functions.items():
                mine = of(RANK, shape, dtype)
                (result,) = run("allreduce", mine, terms=op)
                assert result.dtype == np.dtype(dtype)
                np.testing.assert_array_equal(result, function(every, 0).astype(dtype))
                np.testing.assert_array_equal(mine, every[RANK])
            (result,) = run("allreduce", of(RANK, shape, dtype), terms="Average")
            whole = every.sum(0) / SIZE
            np.testing.assert_allclose(result, whole if dtype.startswith("f") else np.trunc(whole), 1e-3)
        for count in (SIZE, 2 * SIZE, SIZE + 1, 1, 0):
            every = np.stack([of(rank, (count, 2), dtype) for rank in range(SIZE)])
            (result,) = run("reducescatter", every[RANK], terms="Sum")
            np.testing.assert_array_equal(result, np.array_split(every.sum(0).astype(dtype), SIZE)[RANK])


def movements() -> None:
    for dtype in MOVABLE:
        for rows in ([2] * SIZE, [0] * SIZE, range(SIZE), range(SIZE, 0, -1)):
            every = [of(rank, (count, 3), dtype) for rank, count in enumerate(rows)]
            (result,) = run("allgather", every[RANK])
            np.testing.assert_array_equal(result, np.concatenate(every))
        for root in range(SIZE):
            one, other = run("broadcast", of(RANK, (4, 2), dtype), of(RANK, (), dtype), terms=f"root {root}", root=root)
            np.testing.assert_array_equal(one, of(root, (4, 2), dtype))
            np.testing.assert_array_equal(other, of(root, (), dtype))
        none = np.array([], np.int32)
        every = [of(rank, (2 * SIZE, 3), dtype) for rank in range(SIZE)]
        result, received = run("alltoall", every[RANK], none)
        np.testing.assert_array_equal(result, np.concatenate([its[2 * RANK : 2 * RANK + 2] for its in every]))
        assert received.tolist() == [2] * SIZE
        splits = [[(rank + other) % 3 for other in range(SIZE)] for rank in range(SIZE)]
        every = [of(rank, (sum(its), 2), dtype) for rank, its in enumerate(splits)]
        result, received = run("alltoall", every[RANK], np.array(splits[RANK], np.int32))
        parts = [np.split(its, np.cumsum(split)[:-1])[RANK] for its, split in zip(every, splits, strict=True)]
        np.testing.assert_array_equal(result, np.concatenate(parts))
        assert received.tolist() == [split[RANK] for split in splits]


def names() -> None:
    """Calls that each rank makes in an order of its own."""
    order = np.random.default_rng(RANK).permutation(20)
    slots = {number: ArraySlot([np.full(3, number + RANK)]) for number in order}
    for number, slot in slots.items():
        calls.begin(slot, Called("allreduce", f"name {number}", "Sum"), sets)
    for number in range(20):
        (result,) = slots[number].wait()
        assert result.tolist() == [number * SIZE + SIZE * (SIZE - 1) // 2] * 3


def errors() -> None:
    """Each is one of its call, and names the ranks."""
    with pytest.raises(ddl.MismatchError, match=r"rank 0 called .*int64 of shape \(2,\).*rank \d called"):
        run("allreduce", np.arange(2 + (RANK > 0)), terms="Sum")
    with pytest.raises(ddl.UnsupportedError, match="reduction by Sum of bool"):
        run("allreduce", np.ones(1, bool), terms="Sum")
    with pytest.raises(ValueError, match="without dimensions"):
        run("allgather", np.array(1))
    with pytest.raises(ValueError, match="alltoall: splits is"):
        run("alltoall", np.arange(4), np.array([5] * SIZE, np.int32))
    with pytest.raises(ddl.StateError, match="process set 7 is not in use"):
        run("allreduce", np.arange(2), terms="Sum", process_set=7)
    (result,) = run("allreduce", np.array([1.0]), terms="Sum")
    assert result.tolist() == [SIZE]


def joining() -> None:
    """Ranks without data answer the others' reductions."""
    for step in range(RANK):
        values = run("allreduce", np.full(2, 1.0), np.full(2, 3, np.int8), terms="Sum")
        assert [its.tolist() for its in values] == [[SIZE - 1 - step] * 2, [3 * (SIZE - 1 - step)] * 2]
        (least,) = run("allreduce", np.full(2, RANK, np.int64), terms="Min")
        assert least.tolist() == [step + 1] * 2
    assert sets.join() == SIZE - 1


for part in (reductions, movements, names, errors, joining):
    part()
ddl.finalize()
sets.end()
print(f"rank {RANK}: all right")
