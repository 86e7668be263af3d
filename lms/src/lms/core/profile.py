"""Bytes at each access of a step, and the questions that a plan asks of them, in nearly constant time each.

A stretch is the accesses from `start` up to, not including, `stop`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.int64]


class Excess:
    """Bytes above a target at each access. They only fall, so an access that has reached its target is done with.

    Each access points to the next one above its target, and a Fenwick tree holds by how much each was lowered.
    """

    def __init__(self, excess: Bytes) -> None:
        self._end = end = len(excess)
        self._excess: list[int] = excess.tolist()
        above = np.where(excess > 0, np.arange(end), end)
        self._next: list[int] = [*np.minimum.accumulate(above[::-1])[::-1].tolist(), end]
        self._lowered = [0] * (end + 2)

    def within(self, start: int, stop: int) -> bool:
        """Whether an access of the stretch is above its target."""
        following = self._next
        at = start
        while True:
            while following[at] != at:
                following[at] = at = following[following[at]]
            if at >= stop:
                return False
            left, node, lowered = self._excess[at], at + 1, self._lowered
            while node:
                left -= lowered[node]
                node &= node - 1
            if left > 0:
                return True
            following[at] = at + 1

    def lower(self, start: int, stop: int, nbytes: int) -> None:
        """Take `nbytes` off each access of the stretch."""
        lowered, end = self._lowered, self._end
        node = start + 1
        while node <= end:
            lowered[node] += nbytes
            node += node & -node
        node = stop + 1
        while node <= end:
            lowered[node] -= nbytes
            node += node & -node


def lowest(values: Bytes, starts: Bytes, stops: Bytes) -> Bytes:
    """The least of `values` in each of the stretches. No stretch may be empty.

    Row k of the table has the least of the 2**k values from each access on; two of them cover any stretch.
    """
    levels = np.frexp(stops - starts)[1] - 1
    rows = [values]
    for level in range(int(levels.max(initial=0))):
        row = rows[-1].copy()
        half = 1 << level
        np.minimum(row[:-half], row[half:], out=row[:-half])
        rows.append(row)
    table = np.array(rows)
    least: Bytes = np.minimum(table[levels, starts], table[levels, stops - (1 << levels)])
    return least
