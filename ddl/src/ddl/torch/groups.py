"""Makes the process groups that torch.distributed asks for: joins the job, and makes communicators of its parts."""

from __future__ import annotations

import zlib
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

import ddl
from ddl import membership
from ddl.communicator import Communicator, create_group
from ddl.errors import ArgumentError, StateError
from ddl.job import places
from ddl.torch import job, joining, shrinking
from ddl.torch.process_group import ProcessGroup

if TYPE_CHECKING:
    from datetime import timedelta

    from torch._C._distributed_c10d import Store


class Options(Protocol):
    """The part of torch.distributed's DistributedBackendOptions that is used."""

    store: Store
    group_rank: int
    group_size: int
    timeout: timedelta
    group_id: str
    global_ranks_in_group: list[int]  # empty: all


def create(options: object) -> ProcessGroup:
    """A process group. Collective over its ranks. Raises LaunchError and other DDLErrors."""
    asked: Options = options  # type: ignore[assignment]
    shrinking.install()
    joining.install()
    ranks = list(asked.global_ranks_in_group)
    if not ranks:
        job.enter(cast(membership.Store, asked.store), asked.group_rank, asked.group_size, asked.timeout)
        return _default(asked)
    if not ddl.is_initialized():
        raise StateError("new_group of backend ddl: the default group is not of it: init_process_group('ddl')")
    made = ProcessGroup(asked.store, create_group(ranks, zlib.crc32(asked.group_id.encode())), asked.group_id)
    return _timed(made, asked)


def shrink(asked: Options, before: tuple[int, ...], excluded: list[int]) -> ProcessGroup:
    """The group of all ranks but the excluded, all of which are gone. Collective over the others. Raises DDLError."""
    if places() == before:  # the script has not called ddl.shrink itself
        ddl.shrink()
    gone = [rank for rank, place in enumerate(before) if place not in places()]
    if gone != excluded:
        raise ArgumentError(
            f"shrink_group was asked to exclude ranks {excluded}, but those that are gone are {gone}: ddl.shrink() "
            "returns them, and may be called before shrink_group"
        )
    job.enter()
    return _default(asked)


def _default(asked: Options) -> ProcessGroup:
    """The group of all ranks, once the job is entered; it leaves the job when it is destroyed."""
    made = ProcessGroup(asked.store, Communicator(None), asked.group_id, leave=job.leave)
    made.on_shrink = partial(shrink, asked, places())
    return _timed(made, asked)


def _timed(made: ProcessGroup, asked: Options) -> ProcessGroup:
    try:
        made.set_timeout(asked.timeout)
    except BaseException:
        made.shutdown()
        raise
    return made
