"""More elements, and longer messages, than a signed 32-bit number counts."""

import numpy as np

import ddl

COUNT = 2**31 + 1
PIECE = 2**24 + 3  # checked piece by piece: a whole copy would not fit beside the other ranks' buffers


def pattern(begin: int, end: int, factor: int) -> np.ndarray:
    """Bytes that depend on their position."""
    return (np.arange(begin, end, dtype=np.uint64) * np.uint64(factor) >> np.uint64(7)).astype(np.uint8)


def pieces() -> list[tuple[int, int]]:
    """[begin, end) of each piece."""
    return [(begin, min(begin + PIECE, COUNT)) for begin in range(0, COUNT, PIECE)]


ddl.init()
factors = [2 * r + 3 for r in range(ddl.size())]
data = np.empty(COUNT, np.uint8)
for begin, end in pieces():
    data[begin:end] = pattern(begin, end, factors[ddl.rank()])
ddl.allreduce(data)
for begin, end in pieces():
    total = np.zeros(end - begin, np.uint8)
    for factor in factors:
        total += pattern(begin, end, factor)
    assert (data[begin:end] == total).all(), f"allreduce differs in [{begin}, {end})"

root = ddl.size() - 1
if ddl.rank() == root:
    for begin, end in pieces():
        data[begin:end] = pattern(begin, end, 99)
ddl.broadcast(data, root)
for begin, end in pieces():
    assert (data[begin:end] == pattern(begin, end, 99)).all(), f"broadcast differs in [{begin}, {end})"
ddl.barrier()
if ddl.rank() == 0:
    print("large: right", flush=True)
