"""Calls of arrays in host memory, on several ranks."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import numpy as np
import pytest

from ddl.errors import UnsupportedError
from ddl.frontends.core import arrays
from ddl.frontends.core.ops import Op

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_calls_of_arrays_do_what_numpy_does(tcp_ranks: Run, size: int) -> None:
    done = tcp_ranks(size, "array_calls.py", timeout=110)
    assert done.stdout.count("all right") == size, done.stdout


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "uint8"])
@pytest.mark.parametrize("op", [Op.Sum, Op.Average, Op.Min, Op.Max, Op.Product])
def test_a_neutral_array_leaves_the_others_as_they_are(op: Op, dtype: str) -> None:
    other = np.arange(4).astype(dtype)
    neutral = arrays.neutral(op, other.dtype, other.shape)
    combine = {Op.Min: np.minimum, Op.Max: np.maximum, Op.Product: np.multiply}.get(op, np.add)
    assert neutral.dtype == other.dtype
    np.testing.assert_array_equal(combine(neutral, other), other)


def test_adasum_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="Adasum"):
        arrays.check_reducible(np.dtype("float32"), Op.Adasum)
