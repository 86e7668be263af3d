"""DDL: distributed deep learning. A collective library that follows the machine's topology, and its launcher.

import ddl

ddl.init()
ddl.allreduce(gradients, op="average")  # in place, the same bits on every rank
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddl.collectives import (
        Op,
        allgather,
        allgather_async,
        allreduce,
        allreduce_async,
        alltoall,
        alltoall_async,
        barrier,
        barrier_async,
        broadcast,
        broadcast_async,
        reduce_scatter,
        reduce_scatter_async,
    )
    from ddl.communicator import Communicator, create_group, split
    from ddl.errors import (
        ArgumentError,
        DDLError,
        InternalError,
        LibraryError,
        MismatchError,
        OutOfMemoryError,
        PeerLostError,
        RankTimeoutError,
        ShutdownError,
        StateError,
        TransportError,
        UnsupportedError,
    )
    from ddl.job import (
        Epoch,
        epoch,
        finalize,
        init,
        is_initialized,
        local_rank,
        local_size,
        num_hosts,
        rank,
        shrink,
        size,
    )
    from ddl.request import Request

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "Communicator",
    "DDLError",
    "Epoch",
    "InternalError",
    "LibraryError",
    "MismatchError",
    "Op",
    "OutOfMemoryError",
    "PeerLostError",
    "RankTimeoutError",
    "Request",
    "ShutdownError",
    "StateError",
    "TransportError",
    "UnsupportedError",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_async",
    "alltoall",
    "alltoall_async",
    "barrier",
    "barrier_async",
    "broadcast",
    "broadcast_async",
    "create_group",
    "epoch",
    "finalize",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "num_hosts",
    "rank",
    "reduce_scatter",
    "reduce_scatter_async",
    "shrink",
    "size",
    "split",
]

# Where each name lives. It is imported when it is first used: ddlrun, and its probe on every host, need none of them.
_HOMES = {
    "ArgumentError": "ddl.errors",
    "Communicator": "ddl.communicator",
    "DDLError": "ddl.errors",
    "Epoch": "ddl.job",
    "InternalError": "ddl.errors",
    "LibraryError": "ddl.errors",
    "MismatchError": "ddl.errors",
    "Op": "ddl.collectives",
    "OutOfMemoryError": "ddl.errors",
    "PeerLostError": "ddl.errors",
    "RankTimeoutError": "ddl.errors",
    "Request": "ddl.request",
    "ShutdownError": "ddl.errors",
    "StateError": "ddl.errors",
    "TransportError": "ddl.errors",
    "UnsupportedError": "ddl.errors",
    "allgather": "ddl.collectives",
    "allgather_async": "ddl.collectives",
    "allreduce": "ddl.collectives",
    "allreduce_async": "ddl.collectives",
    "alltoall": "ddl.collectives",
    "alltoall_async": "ddl.collectives",
    "barrier": "ddl.collectives",
    "barrier_async": "ddl.collectives",
    "broadcast": "ddl.collectives",
    "broadcast_async": "ddl.collectives",
    "create_group": "ddl.communicator",
    "epoch": "ddl.job",
    "finalize": "ddl.job",
    "init": "ddl.job",
    "is_initialized": "ddl.job",
    "local_rank": "ddl.job",
    "local_size": "ddl.job",
    "num_hosts": "ddl.job",
    "rank": "ddl.job",
    "reduce_scatter": "ddl.collectives",
    "reduce_scatter_async": "ddl.collectives",
    "shrink": "ddl.job",
    "size": "ddl.job",
    "split": "ddl.communicator",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
