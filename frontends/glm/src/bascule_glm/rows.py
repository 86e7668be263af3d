"""Rows of a data set, block by block: what the solvers see of arrays in memory and of files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

Matrix = Any  # an array of shape (rows, features), or a CSR matrix of scipy, which has no types
_BLOCK = 1 << 20  # bytes of a block in memory: it and its float64 copy stay in the processor's cache


@dataclass(frozen=True)
class Block:
    """Some rows. `x` is (r, d) of float32 or float64, dense or CSR; `labels` (r,) or (r, K); `weights` (r,) float64."""

    x: Matrix
    labels: NDArray[Any]
    weights: NDArray[np.float64]


class Rows(Protocol):
    """A data set that can be passed over any number of times."""

    n_rows: int
    n_features: int
    nbytes: int  # of one pass

    def __iter__(self) -> Iterator[Block]:
        """All rows, in blocks. A block is valid until the next is asked for."""


class MemoryRows:
    """Arrays in memory as blocks."""

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

    def standing_for(self, n_rows: int) -> MemoryRows:
        """The same rows, with weights that stand for `n_rows`."""
        return MemoryRows(self.x, self.labels, self.weights * (n_rows / self.n_rows))


def nbytes_of(x: Matrix) -> int:
    """Bytes of a matrix's arrays."""
    if scipy.sparse.issparse(x):
        return int(x.data.nbytes + x.indices.nbytes + x.indptr.nbytes)
    return int(x.nbytes)
