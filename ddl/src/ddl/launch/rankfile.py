"""Places: which rank runs where, and on which cores, in the form of Open MPI and of hydra. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddl.launch.counts import MOST, quoted, whole
from ddl.launch.errors import CheckError
from ddl.launch.hosts import Allocation
from ddl.launch.machine import Machine

_LINE = re.compile(r"rank\s+(\d+)\s*=\s*(\S+)\s+slots?\s*=\s*(\S+)")


@dataclass(frozen=True)
class Place:
    """A rank, its host, its number there, and the socket whose cores it gets (None: all that the job may use)."""

    rank: int
    host: str
    local_rank: int
    socket: int | None = None
    slot: str = ""  # cores as the user's rank file names them, in place of `socket`


def place(
    hosts: Sequence[str], counts: Sequence[int], machines: Mapping[str, Machine], *, order: str = "ranks"
) -> tuple[Place, ...]:
    """A place for every rank: consecutive ranks share a host, or (`order` "hosts") they go round the hosts.

    A rank's number on its host is the GPU that it uses, as in scripts for torchrun; its socket is that GPU's. Ranks
    without a GPU are spread over the sockets.
    """
    if order == "hosts":
        slots = [
            (host, local)
            for local in range(max(counts))
            for host, count in zip(hosts, counts, strict=True)
            if local < count
        ]
    else:
        slots = [(host, local) for host, count in zip(hosts, counts, strict=True) for local in range(count)]
    ranks = dict(zip(hosts, counts, strict=True))
    return tuple(
        Place(rank, host, local, _socket(machines.get(host), local, ranks[host]))
        for rank, (host, local) in enumerate(slots)
    )


def _socket(machine: Machine | None, local: int, count: int) -> int | None:
    if machine is None:
        return None
    if machine.gpus:
        return machine.gpus[local % len(machine.gpus)].socket
    return local * len(machine.sockets) // max(count, len(machine.sockets)) if machine.sockets else None


def to_openmpi(places: Sequence[Place]) -> str:
    """Open MPI's rank file: a line for each rank. `S:*` is every core of socket S."""
    return "".join(f"rank {one.rank}={one.host} slot={_slot(one)}\n" for one in places)


def _slot(one: Place) -> str:
    return one.slot or (f"{one.socket}:*" if one.socket is not None else "0:*")


def bound(places: Sequence[Place]) -> bool:
    """Whether every rank has cores to be bound to: a rank file binds all ranks or none."""
    return all(one.socket is not None or one.slot for one in places)


def to_hydra(places: Sequence[Place]) -> tuple[str, str]:
    """Hydra's host file, and its -rankmap: for each rank the number of its host in that file."""
    counts = Counter(one.host for one in places)
    index = {host: at for at, host in enumerate(counts)}
    hostfile = "".join(f"{host}:{count}\n" for host, count in counts.items())
    return hostfile, ",".join(str(index[one.host]) for one in places)


def hydra_binding(places: Sequence[Place], machines: Mapping[str, Machine]) -> str:
    """Hydra's `user:` binding, the CPUs of each local rank; "" if hosts differ, as hydra takes one for all."""
    lists: dict[int, str] = {}
    for one in places:
        machine = machines.get(one.host)
        if machine is None or one.socket is None:
            return ""
        cpus = "+".join(map(str, machine.sockets[one.socket].cpus))
        if lists.setdefault(one.local_rank, cpus) != cpus:
            return ""
    return "user:" + ",".join(lists[local] for local in sorted(lists))


def parse(text: str, path: str, allocation: Allocation) -> tuple[Place, ...]:
    """The places of a rank file that the user wrote. Raises CheckError, which names the line or the host.

    Every rank from 0 on must be there once, on a host of the allocation, and no host may get more than its slots.
    """
    found: dict[int, tuple[str, str]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        match = _LINE.fullmatch(line)
        if not match:
            raise CheckError("rankfile", f"{path}, line {number}: {quoted(line)}; expected: rank N=HOST slot=CORES")
        try:
            rank = whole(match[1], MOST - 1, 0)
        except ValueError as error:
            raise CheckError("rankfile", f"{path}, line {number}: {quoted(match[1])} is not a rank; {error}") from None
        if rank in found:
            raise CheckError("rankfile", f"{path}, line {number}: rank {rank} is listed twice; expected each rank once")
        found[rank] = (match[2], match[3])
    if missing := [rank for rank in range(max(found, default=0) + 1) if rank not in found]:
        raise CheckError("rankfile", f"{path}: rank {missing[0]} is missing; expected every rank from 0 on")
    local: Counter[str] = Counter()
    places = []
    slots = {host.name: host.slots for host in allocation.hosts}
    for rank in sorted(found):
        host, slot = found[rank]
        if host not in slots:
            raise CheckError(
                "rankfile",
                f"{path}: rank {rank} is on {host!r}, and the hosts are {', '.join(slots)} ({allocation.source}); name "
                "that host with -H, or change the file",
            )
        places.append(Place(rank, host, local[host], slot=slot))
        local[host] += 1
    for host, count in local.items():
        most = slots[host]
        if most is not None and count > most:
            raise CheckError(
                "rankfile",
                f"{path}: it puts {count} ranks on {host}, which has {most} slots ({allocation.source}); take ranks "
                "away, or give the host more slots",
            )
    return tuple(places)
