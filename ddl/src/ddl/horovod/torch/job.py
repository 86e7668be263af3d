"""The job: joining and leaving it, and who is where."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from ddl.errors import LaunchError, UnsupportedError
from ddl.horovod.torch.process_sets import ProcessSet, sets
from ddl.membership import under_mpi
from ddl.torch import job

is_initialized, is_homogeneous = sets.is_initialized, sets.is_homogeneous
rank, size, local_rank, local_size = sets.rank, sets.size, sets.local_rank, sets.local_size
cross_rank, cross_size = sets.cross_rank, sets.cross_size


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
    job.enter()
    try:
        sets.begin()
    except BaseException:
        job.leave()
        raise
    if comm is not None and (not isinstance(comm, Sequence) or sorted(comm) not in ([], sets.everyone.ranks)):
        shutdown()
        raise UnsupportedError(f"init(comm={comm!r}): a job is all ranks that were started: use process sets for parts")
    for process_set in process_sets or ():
        sets.add(process_set)


def shutdown() -> None:
    """Leave the job. `init` may be called again."""
    if is_initialized():
        job.leave()  # before the communicators go: a rank that waits for this one on them is told that it has left
        sets.end()


def cuda_built() -> bool:
    """Whether tensors on GPUs can be reduced: if PyTorch was built with CUDA."""
    return torch.version.cuda is not None
