"""The ranks of a job, over DDL's backend for torch.distributed. One process alone is a job of one rank."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from bascule_caffe.errors import CaffeError


@dataclass(frozen=True)
class Job:
    """This process's place among the ranks. Calls are collective, and raise DDL's errors, which name a dead rank."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Rank 0's tensors on every rank, in place."""
        if self.size > 1:
            self._all([torch.distributed.broadcast(tensor, 0, async_op=True) for tensor in tensors])

    def average(self, tensors: Iterable[Tensor]) -> None:
        """The mean over the ranks, in place, with the same bits on each."""
        if self.size > 1:
            mean = torch.distributed.ReduceOp.AVG
            self._all([torch.distributed.all_reduce(tensor, mean, async_op=True) for tensor in tensors])

    def most(self, number: int) -> int:
        """The largest number that a rank has."""
        if self.size == 1:
            return number
        tensor = torch.tensor(number)
        torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
        return int(tensor)

    def take_signals(self) -> None:
        """Let ddlrun pass Ctrl-C on instead of ending the ranks; each of them has its handlers (`signals`)."""
        if torch.distributed.is_initialized():
            from ddl.launch.reports import take_signals

            self.most(0)  # waits for all
            if self.rank == 0:
                take_signals()

    def leave(self) -> None:
        """Leave the job, if there is one."""
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    @staticmethod
    def _all(works: list[torch.distributed.Work | None]) -> None:
        for work in works:
            if work is not None:
                work.wait()


def launched() -> bool:
    """Whether a launcher (ddlrun, mpirun, torchrun, srun) started this process as one of several."""
    several = int(os.environ.get("SLURM_STEP_NUM_TASKS") or 1) > 1
    return several or any(
        name in os.environ for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")
    )


def join(options: str | None = None) -> Job:
    """Join the launcher's job; without a launcher, be alone.

    `options` is what `-ddl` gave (such as "-mode b:4x8x2"), for libddl. Raises CaffeError if options were given
    without a launcher, or if DDL is not installed.
    """
    if not launched():
        if options is not None:
            raise CaffeError(
                "-ddl needs a launcher, and none started this process. Begin the line with it: "
                "ddlrun -np 2 caffe train ..., or ddlrun -H host1,host2 caffe train ..."
            )
        return Job()
    try:
        import ddl
    except ImportError as error:
        raise CaffeError(f"several ranks need the package bascule-ddl ({error}): install it") from None
    if options:
        os.environ["DDL_OPTIONS"] = options
    torch.distributed.init_process_group("ddl")
    return Job(ddl.rank(), ddl.size(), ddl.local_rank())
