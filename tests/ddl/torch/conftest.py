"""Programs over each of the two backends: the one in Python, and the one in C++ that `make setup` compiles."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from functools import partial

import pytest
import torch

from ddl import build

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(params=["python", "native"])
def either(request: pytest.FixtureRequest, ranks: Run) -> Run:
    """`ranks`, for programs that run over one of the backends."""
    if request.param == "native" and not build.library_path(torch).exists():
        pytest.skip("the backend in C++ was not compiled: `python -m ddl.build torch` says what is missing")
    return partial(ranks, DDL_TORCH_BACKEND=request.param)
