"""DDL: distributed deep learning. A collective library that follows the machine's topology, and its launcher.

import ddl

ddl.init()
ddl.allreduce(gradients, op="average")  # in place, the same bits on every rank
"""

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
from ddl.communicator import Communicator, split
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
from ddl.job import finalize, init, is_initialized, local_rank, local_size, num_hosts, rank, size
from ddl.request import Request

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "Communicator",
    "DDLError",
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
    "finalize",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "num_hosts",
    "rank",
    "reduce_scatter",
    "reduce_scatter_async",
    "size",
    "split",
]
