"""libddl and mpi4py in one process: either may initialise MPI, and either may end it."""

import subprocess
from collections.abc import Callable

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize("last", ["mpi4py", "ddl", "exit"])
@pytest.mark.parametrize("first", ["mpi4py", "ddl"])
def test_both_work_whoever_begins_and_ends(ranks: Run, first: str, last: str) -> None:
    done = ranks(2, "beside_mpi4py.py", first, "multiple", last)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("right") == 2, done.stdout


@pytest.mark.parametrize("level", ["serialized", "funneled", "single"])
def test_fewer_threads_than_both_need_are_refused_with_what_to_ask_for(ranks: Run, level: str) -> None:
    done = ranks(2, "beside_mpi4py.py", "mpi4py", level, "exit")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("refused: ddl_init: MPI was initialised without MPI_THREAD_MULTIPLE") == 2, done.stdout
    assert "ask MPI_Init_thread for it" in done.stdout
