"""The job: joining and leaving it, and who is where."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import torch

import ddl
from ddl.errors import UnsupportedError
from ddl.horovod.torch import process_sets as sets
from ddl.horovod.torch.process_sets import ProcessSet, global_process_set
from ddl.membership import under_mpi
from ddl.torch.job import LaunchError

_local_ranks: list[int] = []  # of all ranks


def init(comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | None = None) -> None:
    """Join the other ranks; blocks until all have called it. A second call does nothing.

    `comm` may list ranks, as long as it lists all of them. `process_sets` are put to use as by `add_process_set`.
    The ranks are MPI's, torchrun's, or those of RANK and WORLD_SIZE. Raises LaunchError: Horovod's own launcher started
    several processes; and what `ddl.init` raises.
    """
    if is_initialized():
        return
    started = os.environ.get("HOROVOD_SIZE", "1")
    if started != "1" and "WORLD_SIZE" not in os.environ and not under_mpi(os.environ):
        raise LaunchError(
            f"hvd.init(): HOROVOD_SIZE is {started}, but this process does not know how to find the other ranks: start "
            f"it with ddlrun -np {started} python SCRIPT ARGUMENTS, or with torchrun"
        )
    sets.begin()
    if comm is not None and (not isinstance(comm, Sequence) or sorted(comm) not in ([], global_process_set.ranks)):
        shutdown()
        raise UnsupportedError(f"init(comm={comm!r}): a job is all ranks that were started: use process sets for parts")
    _local_ranks[:] = ddl.allgather(np.array([ddl.local_rank()])).ravel().tolist()
    for process_set in process_sets or ():
        sets.add_process_set(process_set)


def shutdown() -> None:
    """Leave the job. `init` may be called again."""
    sets.end()
    _local_ranks.clear()


def is_initialized() -> bool:
    """Whether this process is part of a job: after `init`, before `shutdown`."""
    return global_process_set.process_set_id is not None


def rank() -> int:
    """This process's number among all, from 0. Raises StateError before `init`."""
    return global_process_set.rank()


def size() -> int:
    """The number of processes. Raises StateError before `init`."""
    return global_process_set.size()


def local_rank() -> int:
    """This process's number among those on its host, from 0. Raises StateError before `init`."""
    rank()
    return ddl.local_rank()


def local_size() -> int:
    """The number of processes on this host. Raises StateError before `init`."""
    rank()
    return ddl.local_size()


def cross_rank() -> int:
    """This process's number among those with its `local_rank` on all hosts. Raises StateError before `init`."""
    return _local_ranks[: rank()].count(ddl.local_rank())


def cross_size() -> int:
    """How many hosts have a process with this one's `local_rank`. Raises StateError before `init`."""
    rank()
    return _local_ranks.count(ddl.local_rank())


def is_homogeneous() -> bool:
    """Whether every host has as many processes. Raises StateError before `init`."""
    rank()
    return len({_local_ranks.count(its) for its in set(_local_ranks)}) == 1


def mpi_threads_supported() -> bool:
    """Whether other threads may use MPI beside: no, libddl's own does all."""
    rank()
    return False


def mpi_enabled() -> bool:
    """Whether MPI carries the messages: always."""
    return True


def mpi_built() -> bool:
    """Whether there is MPI: always."""
    return True


def gloo_enabled() -> bool:
    """Whether gloo carries the messages: never."""
    return False


def gloo_built() -> bool:
    """Whether there is gloo: no."""
    return False


def nccl_built() -> int:
    """The version of NCCL that it was built with: 0, as libddl finds one at run time."""
    return 0


def ddl_built() -> bool:
    """Whether there is DDL (a backend that Horovod had): yes."""
    return True


def ccl_built() -> bool:
    """Whether there is oneCCL: no."""
    return False


def cuda_built() -> bool:
    """Whether tensors on GPUs can be reduced: where PyTorch was built with CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether tensors on AMD's GPUs can be reduced: no."""
    return False
