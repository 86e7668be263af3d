"""The job that this process belongs to: joining it, leaving it, and who is where."""

from __future__ import annotations

import atexit
import os
from ctypes import byref, c_int, c_uint64
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddl import library, membership, request, slurm
from ddl.errors import ArgumentError, DDLError, StateError
from ddl.membership import Membership

if TYPE_CHECKING:
    from ddl.membership import Store

_registered = False
_places: tuple[int, ...] = ()  # of each rank: its number in `init`
_memberships: list[Membership] = []  # libddl calls them in later starts, too, and other ranks may read rank 0's store


def init(
    options: str | None = None, *, store: Store | None = None, rank: int | None = None, size: int | None = None
) -> None:
    """Join the ranks of this job; blocks until every rank has called it.

    `options` has the syntax of the environment's `DDL_OPTIONS` ("-mode r:4x2 -dbg_level 1"), which is taken if it
    is None.

    `store`, `rank` and `size`, all or none of them, are for processes that find one another without MPI. The store has
    `set(key, bytes)` and `get(key)`, which returns bytes; if there is nothing under the key, it returns None or raises
    KeyError. A store of torch.distributed is one. What the store raises, this raises.

    Without them: MPI's ranks under mpirun or ddlrun, torchrun's, those of RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT, those of srun, else the process is the only rank.

    Raises ArgumentError (options that cannot be read, dimensions that do not multiply to the number of ranks, a rank
    outside of [0, size)), UnsupportedError, MismatchError (options or versions differ between ranks), RankTimeoutError,
    StateError (initialised already), LibraryError.
    """
    global _places, _registered
    given = (store is not None, rank is not None, size is not None)
    if any(given) and not all(given):
        raise ArgumentError("ddl.init: store, rank and size belong together: give all three, or none")
    if store is None and not membership.under_mpi(os.environ):
        slurm.adopt(os.environ)
    if store is None and "TORCHELASTIC_RUN_ID" in os.environ and not membership.under_mpi(os.environ):
        # The port at MASTER_PORT is the agent's, whose store PyTorch knows to use.
        store, rank, size = membership.from_torch()
    text = None if options is None else options.encode()
    if store is None or rank is None or size is None:
        library.call("ddl_init", text)
    else:
        _init_with(text, Membership(store, rank, size))
    _places = tuple(range(library.number("ddl_size", None)))
    if not _registered:
        # Before other packages' exit handlers, of which mpi4py's ends MPI.
        atexit.register(finalize)
        _registered = True


def _init_with(options: bytes | None, its: Membership) -> None:
    _memberships.append(its)
    try:
        library.call("ddl_init_with", its.pointer, options)
    except DDLError as error:
        if its.error is not None:
            raise its.error from error
        raise


def finalize() -> None:
    """Leave the job: requests in flight end with ShutdownError, communicators are freed. Does not wait for others.

    It is called at exit. MPI lives on, so that `init` may be called again. Without an `init` it does nothing.
    """
    library.call("ddl_finalize")
    request.sweep()


@dataclass(frozen=True)
class Epoch:
    """What `shrink` returns: who this process is among those that go on."""

    number: int  #: of the epoch, the same on all ranks
    rank: int  #: this process's number now
    size: int  #: how many ranks there are now
    gone: tuple[int, ...]  #: the former ranks of those that died or left


def shrink() -> Epoch:
    """Go on without the ranks that died. Collective over all ranks that are alive; blocks.

    They keep their order and get consecutive ranks. Requests in flight end with PeerLostError on all ranks, and no
    message reaches the new epoch. Every `Communicator` is freed: make others with `split`.

    The step in which a rank died has to be done again or dropped. Survivors may be one collective apart, so they must
    agree on the step: `ddl.allreduce(step, "min")`.

    Only over TCP: raises UnsupportedError under MPI, and nothing has changed then. After any other error this process
    has left the job: RankTimeoutError (a rank that is alive does not call it), PeerLostError (this rank was cut off
    from the others, which may go on without it).
    """
    global _places
    former = size()
    numbers, count = (c_int * former)(), c_int()
    library.call("ddl_shrink", numbers, former, byref(count))
    gone = tuple(numbers[: count.value])
    _places = tuple(place for number, place in enumerate(_places) if number not in gone)
    request.sweep()
    return Epoch(epoch(), rank(), size(), gone)


def places() -> tuple[int, ...]:
    """Of each rank, the number that it had after `init`, before any `shrink`."""
    return _places


def epoch() -> int:
    """The number of this epoch: 0 after `init`, and higher after each `shrink`. Raises StateError before `init`."""
    value = c_uint64()
    library.call("ddl_epoch", byref(value))
    return value.value


def is_initialized() -> bool:
    """Whether this process is part of a job: after `init`, before `finalize`."""
    try:
        library.number("ddl_size", None)
    except StateError:
        return False
    return True


def rank() -> int:
    """This process's number among all, from 0. Raises StateError before `init`."""
    return library.number("ddl_rank", None)


def size() -> int:
    """The number of processes in the job. Raises StateError before `init`."""
    return library.number("ddl_size", None)


def local_rank() -> int:
    """This process's number among those on its host, from 0. Raises StateError before `init`."""
    return library.number("ddl_local_rank")


def local_size() -> int:
    """The number of the job's processes on this host. Raises StateError before `init`."""
    return library.number("ddl_local_size")


def num_hosts() -> int:
    """The number of hosts that the job runs on. Raises StateError before `init`."""
    return library.number("ddl_num_hosts")
