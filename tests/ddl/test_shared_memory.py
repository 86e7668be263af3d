"""Short messages between the ranks of a host go through shared memory, if all of them can have it."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]
BOTH = pytest.mark.parametrize("ranks", ["mpi", "tcp"], indirect=True)


def shared_files() -> set[str]:
    """The files in the system's folder of shared memory, which could be left behind."""
    return {entry.name for entry in Path("/dev/shm").iterdir() if "ddl" in entry.name}


@pytest.mark.alone
@BOTH
@pytest.mark.parametrize("size", [2, 3, 6])
def test_it_is_used_and_the_results_are_numpys(ranks: Run, size: int) -> None:
    before = shared_files()
    done = ranks(size, "shared_memory.py", DDL_OPTIONS="-dbg_level 1")
    assert done.returncode == 0, done.stdout
    assert "right" in done.stdout.splitlines()
    assert f": {size} ranks have" in done.stdout, done.stdout
    assert shared_files() == before


def test_it_can_be_switched_off(ranks: Run) -> None:
    done = ranks(2, "shared_memory.py", DDL_OPTIONS="-dbg_level 1 -shared_memory 0")
    assert done.returncode == 0, done.stdout
    assert "right" in done.stdout.splitlines()
    assert "shared memory" not in done.stdout


@BOTH
def test_where_it_cannot_be_made_all_do_without_and_say_why(ranks: Run) -> None:
    done = ranks(3, "shared_memory.py", "files", DDL_OPTIONS="-dbg_level 1")
    assert done.returncode == 0, done.stdout
    assert "right" in done.stdout.splitlines()
    assert "ddl: shared memory is not used on host " in done.stdout, done.stdout
    assert "rank 0: a file of " in done.stdout, done.stdout


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="hiding the processes from a rank needs root")
def test_where_one_rank_cannot_open_it_all_do_without_and_say_why(ranks: Run) -> None:
    done = ranks(3, "shared_memory.py", "proc", DDL_OPTIONS="-dbg_level 1")
    assert done.returncode == 0, done.stdout
    assert "right" in done.stdout.splitlines()
    assert "ddl: shared memory is not used on host " in done.stdout, done.stdout
    assert "rank 1: /proc/" in done.stdout, done.stdout
