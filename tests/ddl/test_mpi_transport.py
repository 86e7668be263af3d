"""The transport over MPI below the engine: builds tests/ddl/csrc_mpi and runs it on some ranks."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

BUILD = Path(__file__).parents[2] / "out" / "ddl-build" / "plain"  # test_native.py's: most of it is compiled already
MPICXX = Path(sys.executable).with_name("mpicxx")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", [2, 3])
def test_messages_and_notices_arrive(
    ranks: Callable[..., subprocess.CompletedProcess[str]], native: Callable[..., Path], size: int
) -> None:
    folder = native(BUILD, "ddl_mpi_tests", f"-DMPI_CXX_COMPILER={MPICXX}")
    done = ranks(size, folder / "ddl_mpi_tests")
    assert done.returncode == 0, done.stdout
