"""The job that this process belongs to: joining it, leaving it, and who is where."""

from __future__ import annotations

import atexit
import os
import sys
from ctypes import byref, c_int, c_uint64
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddl import library, membership, request, slurm
from ddl.errors import ArgumentError, DDLError, StateError
from ddl.membership import Membership

if TYPE_CHECKING:
    from ddl.membership import Store

_registered = False
_places: tuple[int, ...] = ()  # of each rank, a number that it keeps over epochs
_next_place = 0  # that no rank has had
# libddl may call the last one, in `waiting` and in a later start, and other ranks may read rank 0's store. After a
# failed start libddl may still hold either of the last two.
_memberships: list[Membership] = []


def init(
    options: str | None = None, *, store: Store | None = None, rank: int | None = None, size: int | None = None
) -> None:
    """Join the ranks of this job; blocks until every rank has called it.

    `options` has the syntax of the environment's `DDL_OPTIONS` ("-mode r:4x2 -dbg_level 1"), which is taken if it
    is None.

    `store`, `rank` and `size`, all or none of them, are for processes that find one another without MPI. The store has
    `set(key, bytes)` and `get(key)`, which returns bytes; if there is nothing under the key, it returns None or raises
    KeyError. A store of torch.distributed is one. What the store raises, this raises.

    Without them: ddlrun's ranks, MPI's under mpirun, torchrun's, those of RANK, WORLD_SIZE, MASTER_ADDR and
    MASTER_PORT, those of srun, else the process is the only rank.

    Raises ArgumentError (options that cannot be read, dimensions that do not multiply to the number of ranks, a rank
    outside of [0, size)), UnsupportedError, MismatchError (options or versions differ between ranks), RankTimeoutError,
    StateError (initialised already), LibraryError.
    """
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
        _call_with("ddl_init_with", Membership(store, rank, size), text)
    _begin()


def join(options: str | None = None, *, store: Store | None = None) -> None:
    """Join a job that runs already, over TCP; blocks until its ranks call `resize`, at most DDL_TIMEOUT seconds.

    Then this process is one of its ranks, as after `init`; `epoch` is above 0. `options` must be those of the job.
    `store`: that of the job's ranks; without one MASTER_ADDR and MASTER_PORT are the job's.

    Raises RankTimeoutError (no rank has called `waiting`, or the ranks have not called `resize`), MismatchError
    (options or versions differ from the job's), ArgumentError, PeerLostError (ranks died, and this one was cut off),
    StateError (initialised already), LibraryError, and what the store raises.
    """
    text = None if options is None else options.encode()
    if store is None:
        library.call("ddl_join", None, text)
    else:
        _call_with("ddl_join", Membership(store, 0, 1), text)
    _begin()


def _call_with(function: str, its: Membership, options: bytes | None) -> None:
    _memberships.append(its)
    try:
        library.call(function, its.pointer, options)
    except DDLError as error:
        if its.error is not None:
            raise its.error from error
        raise
    del _memberships[: _memberships.index(its)]  # with their stores' connections


def _begin() -> None:
    global _next_place, _places, _registered
    _next_place = size()
    _places = tuple(range(_next_place))
    if not _registered:
        # Before other packages' exit handlers: mpi4py's ends MPI.
        atexit.register(finalize)
        _registered = True
    if any(name in os.environ for name in ("DDL_TENSORBOARD", "DDL_METRICS_PORT")):
        from ddl import watching  # which needs more than most jobs have

        watching.from_environment(os.environ)


def finalize() -> None:
    """Leave the job: requests in flight end with ShutdownError, communicators are freed. Does not wait for others.

    It is called at exit. MPI lives on, so that `init` may be called again. Without an `init` it does nothing.
    """
    if (watching := sys.modules.get("ddl.watching")) is not None:
        watching.end()
    library.call("ddl_finalize")
    request.sweep()


@dataclass(frozen=True)
class Epoch:
    """What `resize` and `shrink` return: who this process is among the ranks of the new epoch."""

    number: int  #: of the epoch, the same on all ranks
    rank: int  #: this process's number now
    size: int  #: how many ranks there are now
    gone: tuple[int, ...]  #: the former ranks of those that died or left
    joined: int  #: how many have joined: the last ranks of the epoch


def resize() -> Epoch:
    """Begin the next epoch: without the ranks that died, and with the processes that wait in `join`.

    Collective over all ranks that are alive; blocks. They keep their order and get consecutive ranks; those that have
    joined come behind them. Requests in flight end with PeerLostError on all ranks, and no message reaches the new
    epoch. Every `Communicator` is freed: make others with `split`.

    The step in which a rank died has to be done again or dropped. Survivors may be one collective apart, so they must
    agree on the step: `ddl.allreduce(step, "min")`. Who has joined must be given the state: `ddl.broadcast(state, 0)`.

    Only over TCP: raises UnsupportedError under MPI, and nothing has changed then. After any other error this process
    has left the job: RankTimeoutError (a rank that is alive does not call it), PeerLostError (this rank was cut off
    from the others, which may go on without it).
    """
    return _next_epoch("ddl_resize")


def shrink() -> Epoch:
    """Begin the next epoch as `resize` does, and take nobody in."""
    return _next_epoch("ddl_shrink")


def _next_epoch(function: str) -> Epoch:
    global _next_place, _places
    former = size()
    numbers, count, joined = (c_int * former)(), c_int(), c_int()
    library.call(function, numbers, former, byref(count), *([byref(joined)] if function == "ddl_resize" else []))
    gone = tuple(numbers[: count.value])
    new = range(_next_place, _next_place + joined.value)
    _places = (*(place for number, place in enumerate(_places) if number not in gone), *new)
    _next_place = new.stop
    request.sweep()
    if (watching := sys.modules.get("ddl.watching")) is not None:
        watching.renew()
    return Epoch(epoch(), rank(), size(), gone, joined.value)


def waiting() -> int:
    """How many processes wait in `join`. Rank 0 alone knows; elsewhere it is 0: tell the others, then all `resize`.

    The first call on rank 0 opens the door: before it, nobody finds this job. Raises StateError before `init`.
    """
    return library.number("ddl_waiting")


def places() -> tuple[int, ...]:
    """Of each rank, a number that it keeps over epochs and that no other rank has had: after `init` its own."""
    return _places


def epoch() -> int:
    """The number of this epoch: 0 after `init`, and higher after each `resize`. Raises StateError before `init`."""
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


def timeout_or(default: float) -> float:
    """The seconds of DDL_TIMEOUT, or `default` if it is not set."""
    try:
        return float(os.environ["DDL_TIMEOUT"])
    except (KeyError, ValueError):  # ddl_init refuses what is no number
        return default
