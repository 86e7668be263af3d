"""The ranks of a job step that `srun` started without PMI."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddl.slurm import adopt, first_host

PROGRAM = Path(__file__).parent / "programs" / "slurm_step.py"
# As srun of Slurm sets them for a task of `srun --ntasks 4 --nodes 2 --mpi=none`, some of many.
STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "n[03-04]",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_JOB_NODELIST": "n[01-04]",
}


def adopted(**changes: str | None) -> dict[str, str]:
    environment = {name: value for name, value in (STEP | changes).items() if value is not None}
    before = dict(environment)
    adopt(environment)
    return {name: value for name, value in environment.items() if before.get(name) != value}


def test_a_task_of_a_step_is_a_rank() -> None:
    found = adopted()
    assert (found["RANK"], found["WORLD_SIZE"]) == ("3", "4")
    assert found["MASTER_ADDR"] == "n03"
    assert 1024 <= int(found["MASTER_PORT"]) < 32768
    assert found["MASTER_PORT"] == adopted(SLURM_PROCID="0")["MASTER_PORT"]
    assert found["MASTER_PORT"] != adopted(SLURM_STEP_ID="3")["MASTER_PORT"]


def test_an_address_and_a_port_that_are_set_stay() -> None:
    assert adopted(MASTER_ADDR="here", MASTER_PORT="1") == {"RANK": "3", "WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    "changes",
    [
        {"RANK": "0"},  # of another launcher
        {"WORLD_SIZE": "2"},
        {"SLURM_STEP_NUM_TASKS": "1"},  # torchrun's agent, or ddlrun
        {"SLURM_STEP_NUM_TASKS": None, "SLURM_STEP_ID": None, "SLURM_STEP_NODELIST": None},  # sbatch's script
    ],
)
def test_a_process_that_is_no_task_of_several_stays_alone(changes: dict[str, str | None]) -> None:
    assert adopted(**changes) == {}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("h0", "h0"),
        ("h0,h1", "h0"),
        ("n[03-07,9],m2", "n03"),
        ("a[1,3]b[02-04],c", "a1b02"),
        ("gpu-[1-2]-x", "gpu-1-x"),
    ],
)
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize("front_end", ["numpy", "torch"])
def test_the_tasks_of_a_step_meet(front_end: str) -> None:
    step = STEP | {"SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": str(os.getpid())}
    command = [sys.executable, str(PROGRAM), front_end]
    tasks = [
        subprocess.Popen(
            command, env={**os.environ, **step, "SLURM_PROCID": rank}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        for rank in ("0", "1")
    ]
    said = [task.communicate(timeout=60)[0].decode() for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], said
    assert "rank 0 of 2: 3.0" in said[0]
    assert "rank 1 of 2: 3.0" in said[1]
