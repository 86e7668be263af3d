"""torch.distributed's default rendezvous, env://, for ranks that plain mpirun started.

mpirun sets none of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which env:// reads; MPI knows them.
"""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from importlib import import_module
from typing import TYPE_CHECKING, cast

from ddl import slurm
from ddl.errors import LaunchError
from ddl.membership import under_mpi

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    Handler = Callable[..., Iterator[tuple[Store, int, int]]]

_CONTACTS_BYTES = 1024  # of the text in which rank 0 says where its store is

# The number of processes, as Open MPI and MPICH set it.
_MPI_SIZE = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def asks_mpi(environment: Mapping[str, str]) -> bool:
    """Whether MPI started this process, and nobody has set the numbers that env:// reads."""
    return under_mpi(environment) and not any(environment.get(name) for name in ("RANK", "WORLD_SIZE"))


def odd_size(environment: Mapping[str, str]) -> str | None:
    """A warning if WORLD_SIZE is not the number of processes that MPI started; else None."""
    started = next((environment[name] for name in _MPI_SIZE if name in environment), None)
    asked = environment.get("WORLD_SIZE") or started
    # A torchrun on each host may well be started by MPI.
    if started in (None, asked) or "TORCHELASTIC_RUN_ID" in environment:
        return None
    return (
        f"init_process_group: WORLD_SIZE is {asked}, but MPI started {started} processes: the backend ddl needs the "
        "same number, and any backend waits for ranks that do not come until its timeout. ddlrun sets it; without it, "
        "and without RANK, MPI is asked"
    )


def install() -> None:
    """Replace torch.distributed's handler of env:// by `env_or_mpi`."""
    # The package has a function of the module's name.
    handlers: dict[str, Handler] = import_module("torch.distributed.rendezvous")._rendezvous_handlers
    original = handlers["env"]
    if getattr(original, "is_of_ddl", False):
        return

    def env_or_mpi(url: str, timeout: timedelta | None = None, **others: object) -> Iterator[tuple[Store, int, int]]:
        if "rank=" in url or not asks_mpi(os.environ):
            if not under_mpi(os.environ):
                slurm.adopt(os.environ)
            if odd := odd_size(os.environ):
                warnings.warn(odd, RuntimeWarning, stacklevel=3)  # no error: another backend may have its reasons
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
    from ddl.launch import guard
    from ddl.torch import job

    patience = timeout or default_pg_timeout
    job.join(timeout=patience)
    rank, size = ddl.rank(), ddl.size()
    text = np.zeros(_CONTACTS_BYTES, np.uint8)
    store = None
    if rank == 0:
        # It listens at all of the host's addresses. Port 0: the system chooses a free one.
        store = TCPStore("127.0.0.1", 0, size, True, timeout=patience, wait_for_workers=False)
        said = described(store.port, own_hosts(ddl.num_hosts()))
        text[: len(said)] = np.frombuffer(said, np.uint8)
    ddl.broadcast(text, 0)
    if store is None:
        port, *hosts = text.tobytes().rstrip(b"\0").decode().split()
        connection = guard.connect([f"{host}:{port}" for host in hosts])
        if connection is None:
            raise LaunchError(
                f"rank {rank} on host {socket.gethostname()} cannot reach the store of rank 0, port {port} of "
                f"{', '.join(hosts)}: let the hosts connect to one another over TCP (a firewall?), or start the job "
                "with ddlrun, or with MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE set"
            )
        with connection:
            host = connection.getpeername()[0]
        store = TCPStore(host, int(port), size, False, timeout=patience, wait_for_workers=False)
    return cast("Store", store), rank, size


def own_hosts(num_hosts: int) -> list[str]:
    """Names and addresses at which ranks may reach this host, best first."""
    if num_hosts == 1:
        return ["127.0.0.1"]
    from ddl.launch.reach import outer_addresses

    # The name may lead to 127.0.1.1, or nowhere; but a host may have IPv6 addresses only.
    return [*outer_addresses(), socket.gethostname()]


def described(port: int, hosts: Sequence[str]) -> bytes:
    """The port, and as many of the hosts as there is space for."""
    text = f"{port} {' '.join(hosts)}"
    return (text if len(text) <= _CONTACTS_BYTES else text[:_CONTACTS_BYTES].rpartition(" ")[0]).encode()
