"""Process sets whose calls go through PyTorch's process groups."""

from __future__ import annotations

from typing import cast

import torch

from ddl.communicator import Communicator
from ddl.frontends.core import process_sets as core
from ddl.frontends.core.announcements import Announcement
from ddl.horovod.torch import starting
from ddl.torch import job
from ddl.torch.process_group import ProcessGroup
from ddl.torch.work import Work


class ProcessSet(core.ProcessSet[ProcessGroup]):
    """The ranks that take part in a call; `ProcessSet([0, 2])`. It works after `add_process_set`, or `init`."""


_device = -1  # a GPU's number, for `answer`


def _group_of(comm: Communicator, name: str) -> ProcessGroup:
    return ProcessGroup(None, comm, name)


def _answer(announcement: Announcement, group: core.Group) -> Work:
    return starting.answer(announcement, cast(ProcessGroup, group), _device)


sets = core.ProcessSets(ProcessSet, _group_of, _answer)
global_process_set = sets.everyone
add_process_set, remove_process_set = sets.add, sets.remove


def begin() -> None:
    """Join the job, and make the set of all ranks."""
    job.enter()
    try:
        sets.begin()
    except BaseException:
        job.leave()
        raise


def end() -> None:
    """Remove all sets, and leave the job."""
    if sets.is_initialized():
        job.leave()  # before the communicators go: a rank that waits for this one on them is told that it has left
        sets.end()


def join(device: int) -> int:
    """Answer the others' reductions until every rank has called it; returns the one that was the last to."""
    global _device
    # Which GPU is the current one differs from thread to thread, and another thread may answer.
    _device = torch.cuda.current_device() if device < 0 and torch.cuda.is_available() else device
    return sets.join()
