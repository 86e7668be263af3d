"""DDP, FSDP2, DTensor and checkpoints over the backend ddl."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "programs" / "torch_training.py"


# The fast test of DDP is that of examples/ddp_digits.
@pytest.mark.slow
@pytest.mark.parametrize("part", ["ddp", "buckets_in_flight", "fsdp", "resume", "save_and_load", "dtensor"])
def test_training_is_that_of_one_process_or_of_gloo(ranks: Callable[..., object], part: str) -> None:
    done = ranks(4, PROGRAM, part, timeout=110)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(f": {part}\n") == 4


@pytest.mark.slow
@pytest.mark.parametrize("part", ["fsdp", "dtensor"])
def test_so_it_is_over_tcp(tcp_ranks: Callable[..., object], part: str) -> None:
    done = tcp_ranks(4, PROGRAM.name, part, timeout=110)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(f": {part}\n") == 4


@pytest.mark.slow
def test_a_script_for_torchrun_runs_under_ddlrun(command: Callable[..., object], tmp_path: Path) -> None:
    ddlrun = [sys.executable, "-m", "ddl.ddlrun", "-np", "2"]
    done = command([*ddlrun, sys.executable, str(PROGRAM), "ddp"], timeout=110)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(": ddp") == 2
