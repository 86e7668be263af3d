"""Fake hosts for the launcher's tests, and a real mpirun for tests that need one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from ddl.launch import mpi
from ddl.launch.decide import Found
from ddl.launch.hosts import Allocation, Host
from ddl.launch.machine import Gpu, Machine, Nic, Socket
from ddl.launch.mpi import Mpi

FIVE = Mpi(Path("/mpi/bin/mpirun"), "openmpi", (5, 0, 11), "for the test")
FOUR = Mpi(Path("/mpi/bin/mpirun"), "openmpi", (4, 1, 8), "for the test")
HYDRA = Mpi(Path("/mpi/bin/mpirun"), "hydra", (5, 0, 2), "for the test")


def _machine(name: str = "h0", *, sockets: int = 2, cores: int = 4, gpus: int = 0, number: int = 1) -> Machine:
    """A host with `cores` on each socket, GPUs in order over the sockets, eth0 in 10.0.0.0/24, and a docker0."""
    return Machine(
        name,
        tuple(Socket(cores, tuple(range(at * cores, (at + 1) * cores))) for at in range(sockets)),
        gpus=tuple(Gpu("V100", at * sockets // gpus) for at in range(gpus)),
        nics=(
            Nic("docker0", "172.17.0.1", 16, False, "a bridge without a network card, for this host's own containers"),
            Nic("eth0", f"10.0.0.{number}", 24, True, "it is up"),
            Nic("lo", "127.0.0.1", 8, False, "loopback"),
        ),
        python="3.11.7",
        ddl="0.1.0",
        plugin=True,
        free_ports=(4242, 4243, 4244, 4245),
    )


def _found(hosts: int = 2, **kind: int) -> Found:
    """A cluster of equal hosts h0, h1, ... as it would be found."""
    names = [f"h{at}" for at in range(hosts)]
    return Found(
        mpi=FIVE,
        allocation=Allocation(tuple(map(Host, names)), "-H"),
        machines={name: _machine(name, number=at + 1, **kind) for at, name in enumerate(names)},
        addresses={name: f"10.0.0.{at + 1}" for at, name in enumerate(names)},
        environ={"PATH": "/usr/bin", "HOME": "/home/me", "DDL_TIMEOUT": "30"},
        program=("python", "train.py"),
        ports=(5151, 5152),
    )


@pytest.fixture(scope="session")
def machine() -> Callable[..., Machine]:
    return _machine


@pytest.fixture(scope="session")
def found() -> Callable[..., Found]:
    return _found


@pytest.fixture(scope="session")
def mpis() -> Mapping[str, Mpi]:
    return {one.kind: one for one in (FIVE, FOUR, HYDRA)}


@pytest.fixture(scope="session")
def real_mpi() -> Mpi:
    """The mpirun of this environment; its absence is a failure, because `make setup` installs one."""
    return mpi.find()
