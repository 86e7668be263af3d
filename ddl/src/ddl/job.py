"""The job that this process belongs to: joining it, leaving it, and who is where."""

from __future__ import annotations

import atexit

from ddl import library, request
from ddl.errors import StateError

_registered = False


def init(options: str | None = None) -> None:
    """Join the ranks of this job; blocks until every rank has called it.

    `options` has the syntax of the environment's `DDL_OPTIONS` ("-mode r:4x2 -dbg_level 1"), which is taken where it is
    None. Started without mpirun or ddlrun, the process is the only rank. Raises ArgumentError (options that cannot be
    read, or dimensions that do not multiply to the number of ranks), UnsupportedError, MismatchError (options or
    versions differ between ranks), RankTimeoutError, StateError (initialised already), LibraryError.
    """
    global _registered
    library.call("ddl_init", None if options is None else options.encode())
    if not _registered:
        # Before other packages' exit handlers, of which mpi4py's ends MPI.
        atexit.register(finalize)
        _registered = True


def finalize() -> None:
    """Leave the job: requests in flight end with ShutdownError, communicators are freed. Does not wait for others.

    It is called at exit. MPI lives on, so that `init` may be called again. Without an `init` it does nothing.
    """
    library.call("ddl_finalize")
    request.sweep()


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
