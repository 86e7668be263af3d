"""Process sets whose calls go through PyTorch's process groups."""

from __future__ import annotations

from typing import cast

import torch

from ddl.communicator import Communicator
from ddl.frontends.core import process_sets as core
from ddl.frontends.core.announcements import Announcement
from ddl.horovod.torch import starting
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


def join(device: int = -1) -> int:
    """Say that this rank has run out of data, and wait until every rank has; returns the last rank to do so.

    Until then it takes part in the others' allreduces, and in steps of their optimizers, with zeros (in a minimum,
    maximum or product with what leaves that as it is); an average is still over all ranks. `device` is the GPU of these
    zeros if the others' tensors are on one; below 0 the current one. A rank that calls anything else before all have
    joined gets an UnsupportedError.
    """
    global _device
    # Which GPU is the current one differs from thread to thread, and another thread may answer.
    _device = torch.cuda.current_device() if device < 0 and torch.cuda.is_available() else device
    return sets.join()
