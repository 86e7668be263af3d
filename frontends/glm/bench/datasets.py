"""The benchmark's data sets, from a seed. Labels come from a random linear model with noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from scipy import sparse

from bascule_glm import FileRows, convert

Arrays = tuple[Any, NDArray[np.int8]]
_PART = 50_000  # rows that are drawn at once


def labels(x: Any, generator: np.random.Generator) -> NDArray[np.int8]:
    """0 and 1 by the sign of a random linear score with as much noise as score."""
    scores = np.asarray(x @ generator.normal(size=x.shape[1]))
    noisy = scores / max(float(scores.std()), 1e-12) + generator.normal(size=len(scores))
    return (noisy > 0).astype(np.int8)


def sparse_rows() -> Arrays:
    """400,000 x 10,000, 99 non-zeros a row."""
    return _sparse(400_000, 10_000, 99, normed=False)


def rcv1_like() -> Arrays:
    """200,000 x 47,000, some 75 non-zeros a row, frequent columns first, rows of norm 1."""
    return _sparse(200_000, 47_000, 75, normed=True)


def covtype_like() -> Arrays:
    """581,000 x 54: ten numbers and two groups of indicators."""
    generator = np.random.default_rng(2)
    n = 581_000
    x = np.zeros((n, 54), dtype=np.float32)
    x[:, :10] = generator.normal(size=(n, 10))
    x[np.arange(n), 10 + generator.integers(0, 4, n)] = 1
    x[np.arange(n), 14 + generator.integers(0, 40, n)] = 1
    return x, labels(x, generator)


def dense() -> Arrays:
    """1,000,000 x 100."""
    generator = np.random.default_rng(3)
    x = generator.normal(size=(1_000_000, 100)).astype(np.float32)
    return x, labels(x, generator)


SETS = {"sparse": sparse_rows, "rcv1-like": rcv1_like, "covtype-like": covtype_like, "dense": dense}


def larger_than_memory(folder: Path, n: int, columns: int = 256) -> FileRows:
    """A file of n x 256 float32 with rows of norm 1, through Parquet."""
    source = folder / f"rows-{n}x{columns}.parquet"
    if not source.with_name(source.name + ".rows").exists():
        generator = np.random.default_rng(4)
        weights = generator.normal(size=columns)
        names = [f"x{j}" for j in range(columns)]
        schema = pa.schema([(name, pa.float32()) for name in names] + [("label", pa.int8())])
        with pq.ParquetWriter(source, schema, compression="none", use_dictionary=False) as writer:
            for start in range(0, n, _PART):
                x = generator.normal(size=(min(_PART, n - start), columns)).astype(np.float32)
                x /= np.linalg.norm(x, axis=1, keepdims=True)
                y = (3 * (x @ weights) + generator.normal(size=len(x)) > 0).astype(np.int8)
                writer.write_table(pa.table([*x.T, y], schema=schema))
    return convert(source, label="label")


def _sparse(n: int, d: int, entries: int, *, normed: bool) -> Arrays:
    generator = np.random.default_rng(1)
    columns = (d * generator.random((n, entries)) ** (3 if normed else 1)).astype(np.int32)
    data = np.abs(generator.normal(size=n * entries)).astype(np.float32)
    x = sparse.csr_matrix((data, columns.ravel(), np.arange(0, n * entries + 1, entries)), shape=(n, d))
    x.sum_duplicates()
    if normed:
        norms = np.sqrt(np.asarray(x.multiply(x).sum(axis=1)).ravel())
        x = sparse.csr_matrix(sparse.diags(1 / norms) @ x, dtype=np.float32)
    return x, labels(x, generator)
