"""DDL: distributed deep learning. A collective library that follows the machine's topology, and its launcher.

import ddl

ddl.init()
ddl.allreduce(gradients, op="average")  # in place, the same bits on every rank
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddl.collectives import *  # noqa: F403
    from ddl.communicator import *  # noqa: F403
    from ddl.errors import *  # noqa: F403
    from ddl.figures import Stats as Stats
    from ddl.figures import stats as stats
    from ddl.job import *  # noqa: F403
    from ddl.request import *  # noqa: F403
    from ddl.watching import watch as watch

__version__ = "0.1.0"

# The names of the package, by the modules that define them. A module is imported when one of its names is first used:
# ddlrun, and its probe on every host, need none of them.
_NAMES = {
    "collectives": "Op allgather allgather_async allreduce allreduce_async alltoall alltoall_async barrier "
    "barrier_async broadcast broadcast_async reduce_scatter reduce_scatter_async",
    "communicator": "Communicator create_group split",
    "errors": "ArgumentError DDLError InternalError LibraryError MismatchError OutOfMemoryError PeerLostError "
    "RankTimeoutError ShutdownError StateError TransportError UnsupportedError",
    "job": "Epoch epoch finalize init is_initialized join local_rank local_size num_hosts rank resize shrink size "
    "waiting",
    "request": "Request",
    "figures": "Stats stats",
    "watching": "watch",
}
_HOMES = {name: f"ddl.{module}" for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
