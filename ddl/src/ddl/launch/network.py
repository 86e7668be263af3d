"""Decide: the networks that MPI may use, those that lead from host to host. Pure.

MPI takes every interface that is up, and hangs or fails on those that lead nowhere (docker0 has the same address on
every host; a second card may have no cable). The networks of the addresses that the hosts' names resolve to are known
to work: the launcher has just reached every host over them. Others are left out until somebody has measured them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddl.launch.machine import Machine


@dataclass(frozen=True)
class Network:
    """The networks to use (empty: MPI chooses), and the interfaces that are left out, with the reason."""

    networks: tuple[str, ...]
    interfaces: tuple[str, ...]  # names on the first host; hydra takes a name, not a network
    dropped: tuple[tuple[str, str], ...]
    reason: str
    address: str = ""  # of the first host in the first network: ranks find rank 0 there


def choose(hosts: Sequence[str], machines: Mapping[str, Machine], addresses: Mapping[str, str]) -> Network:
    """The networks for ranks on `hosts`, whose names resolve to `addresses` on the launcher's host ("": unknown)."""
    if len(hosts) < 2:
        return Network((), (), (), "one host: shared memory", "127.0.0.1")
    unknown = [host for host in hosts if host not in machines]
    if unknown:
        return Network((), (), (), f"nothing is known of {unknown[0]}: MPI's own choice", addresses.get(hosts[0], ""))
    networks: list[str] = []
    owners = Counter(nic.address for host in hosts for nic in machines[host].nics)
    for host in hosts:
        for nic in machines[host].nics:
            # Any kind of interface counts if no other host has its address, because the host was reached there.
            leads = nic.routes or (nic.why != "loopback" and owners[nic.address] == 1)
            if leads and nic.address == addresses.get(host) and nic.network not in networks:
                networks.append(nic.network)
    first = machines[hosts[0]]
    used = [nic for nic in first.nics if nic.network in networks]
    lost = [host for host in hosts if not any(nic.network in networks for nic in machines[host].nics)]
    if lost or not used:
        why = f"no interface of {(lost or [hosts[0]])[0]} has the address that its name leads to: MPI's own choice"
        return Network((), (), (), why, addresses.get(hosts[0], ""))
    dropped: dict[str, str] = {}
    for host in hosts:
        for nic in machines[host].nics:
            if nic.network not in networks and nic.why != "loopback":
                dropped.setdefault(nic.name, _why(nic.name, hosts, machines, networks))
    return Network(
        tuple(networks),
        tuple(nic.name for nic in used),
        tuple(dropped.items()),
        f"the hosts' names lead to {', '.join(networks)}",
        used[0].address,
    )


def _why(name: str, hosts: Sequence[str], machines: Mapping[str, Machine], networks: Sequence[str]) -> str:
    nics = [nic for host in hosts for nic in machines[host].nics if nic.name == name]
    if dead := [nic for nic in nics if not nic.routes]:
        return dead[0].why
    if len({nic.address for nic in nics}) < len(nics):
        return f"several hosts have its address {nics[0].address}: it leads to no other host"
    return f"no host's name leads to {nics[0].network}"
