"""How ranks find one another where plain mpirun started them: it sets none of RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT, from which torch.distributed's default, env://, makes its store. MPI knows all of that.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    Handler = Callable[..., Iterator[tuple[Store, int, int]]]

_ADDRESS_BYTES = 256

# What MPI's launchers set: Open MPI's, MPICH's (Hydra), and Slurm's and others' through PMIx.
_MPI = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


def under_mpi(environment: Mapping[str, str]) -> bool:
    """Whether a launcher of MPI's started this process."""
    return any(name in environment for name in _MPI)


def install() -> None:
    """Put `env_or_mpi` in the place of torch.distributed's handler of env://."""
    # The package has a function of the module's name.
    handlers: dict[str, Handler] = import_module("torch.distributed.rendezvous")._rendezvous_handlers
    original = handlers["env"]
    if getattr(original, "is_of_ddl", False):
        return

    def env_or_mpi(url: str, timeout: timedelta | None = None, **others: object) -> Iterator[tuple[Store, int, int]]:
        known = "rank=" in url or any(os.environ.get(name) for name in ("RANK", "WORLD_SIZE"))
        if known or not under_mpi(os.environ):
            times = {} if timeout is None else {"timeout": timeout}
            yield from original(url, **times, **others)
            return
        yield join_mpi(timeout)
        raise RuntimeError("env:// under mpirun: there is no second rendezvous")

    env_or_mpi.is_of_ddl = True  # type: ignore[attr-defined]
    handlers["env"] = env_or_mpi


def join_mpi(timeout: timedelta | None) -> tuple[Store, int, int]:
    """A store that rank 0 keeps, this process's rank, and the number of ranks. Collective over MPI's ranks."""
    import numpy as np
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed.constants import default_pg_timeout

    import ddl
    from ddl.torch import groups

    groups.join()
    rank, size = ddl.rank(), ddl.size()
    patience = timeout or default_pg_timeout
    address = np.zeros(_ADDRESS_BYTES, np.uint8)
    store = None
    if rank == 0:
        host = "127.0.0.1" if ddl.num_hosts() == 1 else socket.gethostname()
        # Port 0: the system chooses a free one.
        store = TCPStore(host, 0, size, True, timeout=patience, wait_for_workers=False)
        text = f"{host}:{store.port}".encode()
        address[: len(text)] = np.frombuffer(text, np.uint8)
    ddl.broadcast(address, 0)
    host, port = address.tobytes().rstrip(b"\0").decode().rsplit(":", 1)
    if store is None:
        store = TCPStore(host, int(port), size, False, timeout=patience, wait_for_workers=False)
    return cast("Store", store), rank, size
