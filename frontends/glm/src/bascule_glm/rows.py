"""Rows of a data set, block by block: what the solvers see of arrays in memory and of files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

Matrix = Any  # an array of shape (rows, features), or a CSR matrix of scipy, which has no types
EXACT = 1 << 53  # below it float64 holds every integer
_BLOCK = 1 << 20  # bytes of a block in memory: it and its float64 copy stay in the processor's cache


@dataclass(frozen=True)
class Block:
    """Some rows. `x` is (r, d) of float32 or float64, dense or CSR; `labels` (r,) or (r, K); `weights` (r,) float64."""

    x: Matrix
    labels: NDArray[Any]
    weights: NDArray[np.float64]


class MemoryRows:
    """Arrays in memory as blocks. `nbytes` of one pass."""

    def __init__(self, x: Matrix, labels: NDArray[Any], weights: NDArray[Any] | None = None) -> None:
        self.x, self.labels = x, labels
        self.weights = np.ones(x.shape[0]) if weights is None else np.asarray(weights, dtype=np.float64)
        self.n_rows, self.n_features = x.shape
        self.nbytes = nbytes_of(x)

    def __iter__(self) -> Iterator[Block]:
        step = max(1, int(_BLOCK * self.n_rows // max(self.nbytes, 1)))
        for start in range(0, self.n_rows, step):
            part = slice(start, start + step)
            yield Block(self.x[part], self.labels[part], self.weights[part])

    def every(self, step: int) -> MemoryRows:
        """One row of `step`."""
        return MemoryRows(self.x[::step], self.labels[::step], self.weights[::step]) if step > 1 else self

    def largest(self) -> NDArray[np.float64]:
        """The largest absolute value of each column, (d,)."""
        largest = np.zeros(self.n_features)
        for block in self:
            found = abs(block.x).max(axis=0)
            largest = np.maximum(largest, np.ravel(found.toarray() if scipy.sparse.issparse(found) else found))
        return largest


def nbytes_of(x: Matrix) -> int:
    """Bytes of a matrix's arrays."""
    if scipy.sparse.issparse(x):
        return int(x.data.nbytes + x.indices.nbytes + x.indptr.nbytes)
    return int(x.nbytes)


def extremes(largest: NDArray[np.float64]) -> list[list[float]]:
    """[column, value] of the least and of the largest value that is not zero."""
    used = np.flatnonzero(largest) if largest.any() else [0]
    return [[int(used[one]), float(largest[used[one]])] for one in (np.argmin(largest[used]), np.argmax(largest[used]))]
