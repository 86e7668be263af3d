"""The job that this process is a rank of: whether MPI started it, and how long it stays."""

from __future__ import annotations

from collections.abc import Mapping

import ddl
from ddl.errors import DDLError

# What MPI's launchers set: Open MPI's, MPICH's (Hydra), and Slurm's and others' through PMIx.
_MPI = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
_REMEDY = "Start it with ddlrun, which takes the place of torchrun: ddlrun -np {size} python SCRIPT ARGUMENTS"

_joined = False  # by us: the script has not called ddl.init itself
_members = 0  # that need the job: the default group of torch.distributed, and Horovod's names


class LaunchError(DDLError):
    """The processes of this job were not started in a way that lets them find one another through MPI."""


def under_mpi(environment: Mapping[str, str]) -> bool:
    """Whether a launcher of MPI's started this process."""
    return any(name in environment for name in _MPI)


def check_launch(rank: int, size: int, environment: Mapping[str, str], call: str) -> None:
    """Raises LaunchError, which begins with `call`, where there is certainly no MPI to join."""
    if size == 1 or under_mpi(environment):
        return
    by = "torchrun" if "TORCHELASTIC_RUN_ID" in environment else "something other than ddlrun or mpirun"
    raise LaunchError(
        f"{call}: rank {rank} of {size} was started by {by}, so there is no MPI to join, and "
        f"processes that MPI did not start together cannot connect to one another. {_REMEDY.format(size=size)}"
    )


def check_place(rank: int, size: int) -> None:
    """Raises LaunchError where MPI knows other numbers than torch.distributed."""
    if (rank, size) == (ddl.rank(), ddl.size()):
        return
    raise LaunchError(
        f"init_process_group('ddl') was asked for rank {rank} of {size}, but MPI knows this process as rank "
        f"{ddl.rank()} of {ddl.size()}: RANK and WORLD_SIZE, or rank= and world_size=, must say the same. "
        f"{_REMEDY.format(size=size)}"
    )


def join() -> None:
    """Join the job, unless this process has done so."""
    global _joined
    if not ddl.is_initialized():
        from ddl import library  # `import torch` needs only the questions above

        library.load()
        ddl.init()
        _joined = True


def enter() -> None:
    """Join the job, and stay in it until `leave`."""
    global _members
    join()
    _members += 1


def leave() -> None:
    """Leave the job, unless another member needs it, or the script has joined it itself."""
    global _joined, _members
    _members -= 1
    if _joined and _members == 0:
        _joined = False
        ddl.finalize()
