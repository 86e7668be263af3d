"""Jobs that no MPI started: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and messages over TCP."""

import re
import subprocess
from collections.abc import Callable

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize("shared_memory", ["1", "0"])
def test_every_collective_is_right_and_has_the_same_bits_on_every_rank(tcp_ranks: Run, shared_memory: str) -> None:
    modes = ["p", "r:4", "r:2x2"] if shared_memory == "1" else [f"r:2x2 -shared_memory {shared_memory}"]
    done = tcp_ranks(4, "sweep.py", "4", "host", *modes, timeout=100)
    assert done.returncode == 0, done.stdout
    for mode in modes:
        assert f"-mode {mode}: right" in done.stdout


@pytest.mark.parametrize("fault", ["kill", "leave"])
def test_a_rank_that_dies_is_named_by_all_others(tcp_ranks: Run, fault: str) -> None:
    done = tcp_ranks(4, "faults.py", fault, timeout=40)
    found = re.findall(r"after ([\d.]+) s: PeerLostError: rank 1 .* died during allreduce #20", done.stdout)
    assert len(found) == 3, done.stdout
    assert max(map(float, found)) < 10


def test_mode_m_says_that_it_needs_mpi(tcp_ranks: Run) -> None:
    done = tcp_ranks(2, "init.py", timeout=40, DDL_OPTIONS="-mode m")
    assert done.stdout.count("this job runs over TCP") == 2, done.stdout


def test_a_rank_that_does_not_come_is_named(command: Run) -> None:
    import sys
    from pathlib import Path

    program = Path(__file__).parent / "programs/init.py"
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29613"}
    done = command([sys.executable, program], timeout=40, RANK="0", WORLD_SIZE="2", DDL_TIMEOUT="2", **address)
    assert "rank 0 has waited 2 s for rank 1" in done.stdout, done.stdout
