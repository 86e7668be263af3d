"""The processes of a job step of Slurm: what `srun` tells them if it offers no PMI."""

from __future__ import annotations

import re
from collections.abc import MutableMapping

# Of the step, so set by srun alone: the script that sbatch starts is no rank.
_NEEDED = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_JOB_ID", "SLURM_STEP_ID")
_FIRST_PORT, _PORTS = 10_000, 20_000  # below those that Linux gives to connections


def adopt(environment: MutableMapping[str, str]) -> None:
    """Set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as Slurm's variables say.

    Changes nothing if RANK or WORLD_SIZE is set, or if srun has not started this process as one of several tasks. A
    MASTER_ADDR or MASTER_PORT that is set stays. The address is the step's first host; the port follows from the
    numbers of the job and the step.
    """
    if any(environment.get(name) for name in ("RANK", "WORLD_SIZE")):
        return
    if not all(environment.get(name) for name in _NEEDED) or environment["SLURM_STEP_NUM_TASKS"] == "1":
        return
    environment["RANK"] = environment["SLURM_PROCID"]
    environment["WORLD_SIZE"] = environment["SLURM_STEP_NUM_TASKS"]
    step = 64 * int(environment["SLURM_JOB_ID"]) + int(environment["SLURM_STEP_ID"])
    environment.setdefault("MASTER_ADDR", first_host(environment["SLURM_STEP_NODELIST"]))
    environment.setdefault("MASTER_PORT", str(_FIRST_PORT + step % _PORTS))


def first_host(nodes: str) -> str:
    """The first of Slurm's list of hosts: n03 of `n[03-07,9],m2`."""
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", re.split(r",(?![^\[]*\])", nodes)[0])
