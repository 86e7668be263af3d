"""Collectives over communicators of some ranks, against NumPy; the same bits on each of their ranks.

Each part is made twice: by ddl.split, and by ddl.create_group in another order of its ranks.
"""

import hashlib
import zlib
from collections.abc import Callable

import numpy as np

import ddl

COUNTS = (0, 7, 1001, 20_003)
# The color of a rank; None: it is in no part.
PARTS: dict[str, Callable[[int, int], int | None]] = {
    "all": lambda rank, each: 0,
    "hosts": lambda rank, each: rank // each,
    "a rank of each host": lambda rank, each: rank % each,
    "halves": lambda rank, each: 0 if rank < ddl.size() // 2 else 1,
    "odd and even": lambda rank, each: rank % 2,
    "all but one": lambda rank, each: None if rank == 1 else 0,
}


def values(rank: int, count: int, dtype: type, case: int) -> np.ndarray:
    """The input of `rank`: small numbers, whose sums are exact in any order."""
    return np.random.default_rng([case, rank]).integers(-8, 9, count).astype(dtype)


def sweep(comm: ddl.Communicator, members: list[int]) -> None:
    """All cases on `comm`, whose ranks are `members` of the world, in this order."""
    assert (comm.rank, comm.size) == (members.index(ddl.rank()), len(members))
    digest = hashlib.sha256()
    for case, (count, dtype) in enumerate((c, d) for c in COUNTS for d in (np.float32, np.int64)):
        inputs = [values(rank, count, dtype, case) for rank in members]
        mine = inputs[comm.rank]
        for op, reference in (("sum", np.sum(inputs, 0, dtype)), ("max", np.max(inputs, 0))):
            np.testing.assert_array_equal(ddl.allreduce(mine.copy(), op, comm=comm), reference)
        np.testing.assert_array_equal(ddl.allgather(mine, comm=comm), inputs)
        root = case % len(members)
        np.testing.assert_array_equal(ddl.broadcast(mine.copy(), root, comm=comm), inputs[root])
        noise = [np.random.default_rng([case, rank]).standard_normal(count).astype(np.float32) for rank in members]
        rounded = ddl.allreduce(noise[comm.rank].copy(), comm=comm)
        np.testing.assert_allclose(rounded, np.sum(noise, 0, np.float64), rtol=0, atol=1e-5)
        digest.update(rounded.tobytes())
    digests = ddl.allgather(np.frombuffer(digest.digest(), np.uint8), comm=comm)
    assert (digests == digests[0]).all(), "ranks have different bits"


def main() -> None:
    """Every part, one after the other."""
    ddl.init()
    rank, size = ddl.rank(), ddl.size()
    for name, color_of in PARTS.items():
        colors = [color_of(other, ddl.local_size()) for other in range(size)]
        members = [other for other in range(size) if colors[other] == colors[rank]]
        with ddl.split(colors[rank]) as part:
            if part:
                sweep(part, members)
        if colors[rank] is not None:
            with ddl.create_group(members[::-1], zlib.crc32(name.encode())) as part:
                sweep(part, members[::-1])
        ddl.barrier()
        if rank == 0:
            print(f"{name}: right", flush=True)
    ddl.finalize()


main()
