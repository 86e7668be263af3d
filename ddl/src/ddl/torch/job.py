"""The job that this process is a rank of: who brings its ranks together, and how long it stays."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import ddl
from ddl import slurm
from ddl.errors import LaunchError, RankTimeoutError
from ddl.job import timeout_or
from ddl.membership import from_torch, under_mpi

if TYPE_CHECKING:
    from datetime import timedelta

    from ddl.membership import Store

_MOST_SECONDS = 1e9  # that libddl takes

_joined = False  # by us: the script has not called ddl.init itself
_members = 0  # that need the job: the default group of torch.distributed, and Horovod's names


def join(store: Store | None = None, rank: int = 0, size: int = 1, timeout: timedelta | None = None) -> None:
    """Join the job, unless this process has done so: MPI's if MPI knows this process, else that of the store.

    Without a store it is that of torch.distributed's env://, if WORLD_SIZE says that there are more ranks. `timeout`
    limits how long a rank is waited for, and so does DDL_TIMEOUT, if set.
    """
    global _joined
    if ddl.is_initialized():
        return
    with _at_most(timeout):
        if under_mpi(os.environ):
            ddl.init()
        else:
            slurm.adopt(os.environ)
            if store is None and os.environ.get("WORLD_SIZE", "1") != "1":
                store, rank, size = from_torch()
            ddl.init(store=store, rank=rank, size=size) if store is not None else ddl.init()
    _joined = True


@contextmanager
def _at_most(timeout: timedelta | None) -> Iterator[None]:
    """Have DDL_TIMEOUT, the only timeout of ddl.init, say this one, unless it says a shorter one, or nonsense."""
    seconds = 0 if timeout is None else timeout.total_seconds()
    before = os.environ.get("DDL_TIMEOUT")
    if seconds <= 0 or (before and timeout_or(0) <= seconds):
        yield
        return
    os.environ["DDL_TIMEOUT"] = str(min(seconds, _MOST_SECONDS))
    try:
        yield
    except RankTimeoutError as error:
        raise RankTimeoutError(f"{error}, and so does the timeout of init_process_group") from None
    finally:
        if before is None:
            del os.environ["DDL_TIMEOUT"]
        else:
            os.environ["DDL_TIMEOUT"] = before


def enter(store: Store | None = None, rank: int = 0, size: int = 1, timeout: timedelta | None = None) -> None:
    """Join the job, as `join` does, and stay in it until `leave`.

    Raises LaunchError if a store was given, and the job has this process in another place than `rank` of `size`.
    """
    global _members
    join(store, rank, size, timeout)
    _members += 1
    its_rank, its_size = ddl.rank(), ddl.size()
    if store is not None and (rank, size) != (its_rank, its_size):
        leave()
        knows = "MPI knows this process" if under_mpi(os.environ) else "this process has joined with ddl.init"
        raise LaunchError(
            f"init_process_group('ddl') was asked for rank {rank} of {size}, but {knows} as rank {its_rank} of "
            f"{its_size}: RANK and WORLD_SIZE, or rank= and world_size=, must say the same. ddlrun sets them: ddlrun "
            f"-np {size} python SCRIPT ARGUMENTS"
        )


def leave() -> None:
    """Leave the job, unless another member needs it, or the script has joined it itself."""
    global _joined, _members
    _members -= 1
    if _joined and _members == 0:
        _joined = False
        ddl.finalize()
