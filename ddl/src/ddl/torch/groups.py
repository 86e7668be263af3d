"""From what torch.distributed asks for to a process group over libddl: the job, and communicators of its parts."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import ddl
from ddl import library
from ddl.communicator import Communicator, create_group
from ddl.errors import DDLError, StateError
from ddl.torch.fast_path import wrapped
from ddl.torch.process_group import ProcessGroup
from ddl.torch.rendezvous import under_mpi

if TYPE_CHECKING:
    from datetime import timedelta

    from torch._C._distributed_c10d import Store
    from torch.distributed import Backend

_joined = False  # by us: the script has not called ddl.init itself
_members = 0  # that need the job: the default group of torch.distributed, and Horovod's names


class LaunchError(DDLError, RuntimeError):
    """The processes of this job were not started in a way that lets them find one another through MPI."""


class Options(Protocol):
    """What torch.distributed passes on (DistributedBackendOptions)."""

    store: Store
    group_rank: int
    group_size: int
    timeout: timedelta
    group_id: str
    global_ranks_in_group: list[int]  # empty: all


def create(options: object) -> ProcessGroup | Backend:
    """A process group. Collective over its ranks. Raises LaunchError and other DDLErrors."""
    asked: Options = options  # type: ignore[assignment]
    ranks = list(asked.global_ranks_in_group)
    if ranks:
        if not ddl.is_initialized():
            raise StateError("new_group of backend ddl: the default group is not of it: init_process_group('ddl')")
        communicator = create_group(ranks, zlib.crc32(asked.group_id.encode()))
    else:
        check_launch(asked.group_rank, asked.group_size, os.environ, "init_process_group('ddl')")
        enter()
        communicator = Communicator(None)
    made = ProcessGroup(asked.store, communicator, asked.group_id, leave=None if ranks else leave)
    try:
        if not ranks:
            check_place(asked.group_rank, asked.group_size)
        made.set_timeout(asked.timeout)
        return wrapped(made)
    except BaseException:
        made.shutdown()
        raise


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


_REMEDY = "Start it with ddlrun, which takes the place of torchrun: ddlrun -np {size} python SCRIPT ARGUMENTS"


def join() -> None:
    """Join the job, unless this process has done so."""
    global _joined
    if not ddl.is_initialized():
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
