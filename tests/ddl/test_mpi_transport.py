"""The transport over MPI below the engine: builds tests/ddl/csrc_mpi and runs it on some ranks."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", [2, 3])
def test_messages_and_notices_arrive(
    ranks: Callable[..., subprocess.CompletedProcess[str]], compiled: Callable[[str], Path], size: int
) -> None:
    done = ranks(size, compiled("ddl_mpi_tests") / "ddl_mpi_tests")
    assert done.returncode == 0, done.stdout
