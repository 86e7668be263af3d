"""The port filter: who can connect to the ports of MPI's programs and libraries.

They listen on every address of a host, even if the job has only this host, and no option changes that. So ddlrun loads
the library of csrc/doorkeeper/ into mpirun, its daemons and, with several hosts, the ranks. It limits their ports to
the job's networks, and closes connections of other users and connections that stay silent.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from ipaddress import IPv4Network, IPv6Network, ip_network
from itertools import pairwise
from pathlib import Path

from ddl import library
from ddl.launch.counts import quoted
from ddl.launch.errors import UsageError
from ddl.launch.machine import Machine

Network = IPv4Network | IPv6Network

FILE = "libddl_doorkeeper.so"
NETWORKS = "DDL_DOOR"  # the networks that the filter lets in
PRELOAD = "LD_PRELOAD"
# A blank or a colon ends a path in LD_PRELOAD; Open MPI cuts its daemon's command at blanks and knows no quotes.
_PLAIN = re.compile(r"[\w./+-]+", re.ASCII)
MOST = 16  # networks that the filter reads (csrc/doorkeeper/doorkeeper.cc)
_INTERFACES = ("btl_tcp_if", "prte_if", "oob_tcp_if")  # parameters of Open MPI, each with _include or _exclude
LOOPBACK = ("127.0.0.0/8", "::1/128")


def let_in(used: Sequence[str], given: Mapping[str, str], machines: Sequence[Machine]) -> tuple[str, ...]:
    """The networks to which MPI's ports are open: those in use, and those that the user has Open MPI use too.

    `given` are the user's parameters of Open MPI. They include interfaces or networks (10.9/16 is a valid short form),
    or exclude some, which leaves all other interfaces that lead to other hosts. If there are more than MOST networks,
    neighbours are joined to wider ones. Raises UsageError if a network cannot be read, and if Open MPI would look for
    other hosts on the loopback.
    """
    nics = [nic for one in machines for nic in one.nics]
    loopback = {"lo", *(nic.name for nic in nics if nic.why == "loopback")}
    found = [ip_network(one) for one in used]
    for parameter in _INTERFACES:
        included, excluded = f"{parameter}_include", f"{parameter}_exclude"
        names, networks = _named(included, given.get(included, ""))
        if loopback & names or any(one.is_loopback for one in networks):
            raise UsageError(f"--mpiarg: {included}: the loopback leads to no other host; leave it out")
        found += [*networks, *(ip_network(nic.network) for nic in nics if nic.name in names)]
        if excluded not in given:
            continue
        names, networks = _named(excluded, given[excluded])
        if parameter == "btl_tcp_if" and not loopback & names and not any(one.is_loopback for one in networks):
            why = "it takes the place of Open MPI's own list, and the loopback leads to no other host; add lo"
            raise UsageError(f"--mpiarg: {excluded}: {why}")
        theirs = [ip_network(nic.network) for nic in nics if nic.routes and nic.name not in names]
        found += [one for one in theirs if not any(_lies_in(one, wide) for wide in networks)]
    left = list(dict.fromkeys(found))
    while len(left) > MOST:
        left.sort(key=lambda one: (one.version, one))
        # Join the two neighbours whose common network is the smallest.
        wider = [_holding(one, other) for one, other in pairwise(left) if one.version == other.version]
        most = max(wider, key=lambda one: one.prefixlen - one.max_prefixlen)
        left = [most, *(one for one in left if not _lies_in(one, most))]
    return tuple(map(str, left))


def _named(parameter: str, text: str) -> tuple[set[str], list[Network]]:
    """The names of interfaces, and the networks, in a list of both."""
    names, networks = set(), []
    for word in filter(None, map(str.strip, text.split(","))):
        address, slash, mask = word.partition("/")
        if not slash and not re.fullmatch(r"[\d.]+", word):
            names.add(word)
            continue
        given = address.count(".") + 1
        if ":" not in address:
            address += ".0" * (4 - given)
        try:
            networks.append(ip_network(f"{address}/{mask or 8 * given}", strict=False))
        except ValueError:
            expected = "expected interfaces and networks, such as eth0,10.9.0.0/16"
            raise UsageError(f"--mpiarg: {parameter}: {quoted(word)} is not a network; {expected}") from None
    return names, networks


def _holding(one: Network, other: Network) -> Network:
    while not _lies_in(other, one):
        one = one.supernet()
    return one


def _lies_in(one: Network, wide: Network) -> bool:
    return one.version == wide.version and one.subnet_of(wide)  # type: ignore[arg-type]  # of one version


def find() -> Path | None:
    """The doorkeeper beside libddl; None if there is none, or if LD_PRELOAD cannot name its path."""
    found = library.beside(FILE)
    return found if found and _PLAIN.fullmatch(str(found)) else None


def variables(doorkeeper: Path, networks: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that load it, after the user's own libraries, because AddressSanitizer must come first."""
    others = ":".join(environ.get(PRELOAD, "").split())
    return {PRELOAD: f"{others}:{doorkeeper}" if others else str(doorkeeper), NETWORKS: ",".join(networks)}


def removal(doorkeeper: Path) -> str:
    """A piece of sh that removes it from a rank's environment, and leaves the user's own libraries."""
    return (
        f"LD_PRELOAD=${{LD_PRELOAD%{shlex.quote(str(doorkeeper))}}}; export LD_PRELOAD=${{LD_PRELOAD%:}}; "
        f'[ "$LD_PRELOAD" ] || unset LD_PRELOAD; unset {NETWORKS}; '
    )
