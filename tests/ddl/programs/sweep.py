"""Every collective over sizes, types, operations and plans, against NumPy; the same bits on every rank.

Values are small powers of two, so that sums and products are exact in every type and any order of operands: what is
expected is compared to the last bit. `sweep.py RANKS` takes the plans below; `sweep.py RANKS host|device MODE...` those
modes, with arrays in host memory or in a GPU's (the stub's: gpu.py). `--most N`: smaller arrays, for slow links.
"""

import argparse
import hashlib
import os
from collections.abc import Callable

import ml_dtypes
import numpy as np

import ddl

SIZES = (0, 1, 2, 7, 64, 1001, 20_003)
TYPES = ("float16", ml_dtypes.bfloat16, "float32", "float64", "int8", "int32", "int64", "uint8")
OPS = ("sum", "average", "min", "max", "product")


# How an array gets to the memory in which it is reduced, and its result back.
Carried = tuple[Callable[[np.ndarray], object], Callable[[object], np.ndarray]]


def values(rank: int, shape: tuple[int, ...], dtype: np.dtype, case: int) -> np.ndarray:
    """The input of `rank` to a case: any rank can make any rank's."""
    choices = np.array([1, 2] if dtype == np.uint8 else [-1, 1, 2])
    return np.random.default_rng([case, rank]).choice(choices, shape).astype(dtype)


def expected(inputs: list[np.ndarray], op: str) -> np.ndarray:
    """The reduction as ddl.h defines it."""
    dtype = inputs[0].dtype
    wide = np.float64 if dtype.kind not in "iu" else np.int64
    stack = np.array([array.astype(wide) for array in inputs])
    if op == "min":
        return stack.min(0).astype(dtype)
    if op == "max":
        return stack.max(0).astype(dtype)
    if op == "product":
        return stack.prod(0).astype(dtype)
    total = stack.sum(0)
    if op == "sum":
        return total.astype(dtype)
    if wide == np.int64:
        return np.trunc(total.astype(dtype) / len(inputs)).astype(dtype)
    exact = np.float64 if dtype == np.float64 else np.float32
    return (total.astype(exact) / exact(len(inputs))).astype(dtype)


def same(result: np.ndarray, reference: np.ndarray, what: str) -> None:
    """Fail, naming the case, unless the bits are the same."""
    assert result.shape == reference.shape, f"{what}: shape {result.shape}, expected {reference.shape}"
    if result.tobytes() != reference.tobytes():
        wrong = np.flatnonzero(result.reshape(-1) != reference.reshape(-1))
        raise AssertionError(f"{what}: rank {ddl.rank()} differs at {wrong[:5]} of {result.size}")


def sweep(sizes: tuple[int, ...], types: tuple[object, ...], carried: Carried) -> int:
    """All cases; returns how many."""
    put, get = carried
    rank, size = ddl.rank(), ddl.size()
    digest = hashlib.sha256()
    case = 0
    for count in sizes:
        for name in types:
            dtype = np.dtype(name)
            for op in OPS:
                case += 1
                inputs = [values(r, (count,), dtype, case) for r in range(size)]
                result = get(ddl.allreduce(put(inputs[rank].copy()), op))
                same(result, expected(inputs, op), f"allreduce {dtype} {op} {count}")
                digest.update(result.tobytes())
            case += 1
            part = -(-count // size)
            what = f"{dtype} {part}"
            rows = [values(r, (size, part), dtype, case) for r in range(size)]
            op = OPS[case % len(OPS)]
            mine = put(rows[rank])
            reduced = expected([r[rank] for r in rows], op)
            same(get(ddl.reduce_scatter(mine, op)), reduced, f"reduce_scatter {op} {what}")
            same(get(ddl.alltoall(mine)), np.array([r[rank] for r in rows]), f"alltoall {what}")
            same(get(ddl.allgather(put(rows[rank][0]))), np.array([r[0] for r in rows]), f"allgather {what}")
            root = case % size
            same(get(ddl.broadcast(put(rows[rank][0].copy()), root)), rows[root][0], f"broadcast {root} {what}")
    # A NaN survives minimum and maximum, wherever it comes from: of one rank, and of another.
    for name in TYPES[:4]:
        for op, number in ((o, n) for o in ("min", "max") for n in range(size)):
            mine = np.array([1, -1, np.nan if rank == number else 2] * 700, np.dtype(name))
            result = get(ddl.allreduce(put(mine), op)).astype(np.float64).reshape(-1, 3)
            assert (result[:, :2] == [1, -1]).all(), f"{op} {name} beside NaN"
            assert np.isnan(result[:, 2]).all(), f"{op} {name} lost the NaN of rank {number}"
    # Sums that are rounded: any order is right to rounding, but every rank must have taken the same, each time.
    for dtype in (np.float32, np.float64, np.float16):
        noise = [np.random.default_rng([99, r]).standard_normal(5000).astype(dtype) for r in range(size)]
        result = get(ddl.allreduce(put(noise[rank].copy()), "average"))
        np.testing.assert_allclose(
            result, np.mean(noise, axis=0, dtype=np.float64), atol=2e-2 if dtype == np.float16 else 1e-6
        )
        same(get(ddl.allreduce(put(noise[rank].copy()), "average")), result, f"{np.dtype(dtype)} once more")
        digest.update(result.tobytes())
    digests = ddl.allgather(np.frombuffer(digest.digest(), np.uint8))
    assert (digests == digests[0]).all(), "ranks have different bits"
    return case


def in_flight(most: int, carried: Carried) -> None:
    """Several allreduces at once, waited for in another order than they were started in."""
    put, get = carried
    counts = [min(count, 15 * most) for count in (300_000, 10, 70_001, 5, 40_000, 1000)]
    requests = [
        ddl.allreduce_async(put(np.full(count, ddl.rank() + number, np.int64))) for number, count in enumerate(counts)
    ]
    for number in reversed(range(len(counts))):
        result = get(requests[number].wait())
        assert (result == sum(r + number for r in range(ddl.size()))).all(), f"{counts[number]} in flight"


def plans(size: int) -> list[str]:
    """Options to sweep over: flat, the ways to cut the ranks into dimensions, and MPI's collectives in some of them."""
    shapes = {4: ["2x2"], 6: ["2x3", "3x2x1"], 8: ["2x4", "2x2x2"]}.get(size, [])
    modes = {4: ["rm:2x2", "mr:2x2", "m"], 6: ["rm:2x3", "mr:2x3"], 8: ["mrm:2x2x2"]}.get(size, ["m"])
    of_mpi = [] if os.environ.get("DDL_TRANSPORT") == "tcp" else modes
    return ["p", f"r:{size}", *(f"r:{shape}" for shape in shapes), *of_mpi]


def main(size: int, memory: str, modes: list[str], most: int) -> None:
    """Sweep over the modes, each in a session of its own, with up to `most` elements, in one call some more."""
    sizes = tuple(count for count in SIZES if count <= most)
    carried: Carried = (lambda array: array, lambda array: array)  # type: ignore[assignment, return-value]
    if memory == "device":
        import gpu

        carried = (lambda array: gpu.Array(array, late=True), lambda array: array.numpy())  # type: ignore[attr-defined]
    for index, mode in enumerate(modes or plans(size)):
        options = f"-mode {mode}"
        ddl.init(options)
        assert ddl.size() == size
        # The first plan takes every type; another changes who adds what, for which few types speak.
        if index == 0:
            sweep(sizes, TYPES, carried)
        else:
            sweep((0, 5, sizes[-1]), ("float32", "float16", "int64"), carried)
        in_flight(most, carried)
        put, get = carried
        large = put(np.full(min(1_000_003, 50 * most), ddl.rank() + 1, np.float32))
        assert (get(ddl.allreduce(large)) == sum(range(1, size + 1))).all()
        ddl.barrier()
        if ddl.rank() == 0:
            print(f"{options}: right", flush=True)
        ddl.finalize()


parser = argparse.ArgumentParser()
parser.add_argument("ranks", type=int)
parser.add_argument("memory", nargs="?", default="host")
parser.add_argument("modes", nargs="*")
parser.add_argument("--most", type=int, default=SIZES[-1])
given = parser.parse_args()
main(given.ranks, given.memory, given.modes, given.most)
