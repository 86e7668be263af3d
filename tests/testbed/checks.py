"""Does a testbed do what its topology says? Links carry their rates, uplinks are shared, decoys lead nowhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from goodput import expect_ready, measure
from testbed import Testbed, TestbedError
from topology import PAYLOAD, Rack, Topology, format_rate

TOLERANCE = 0.05  # of the goodput that a shaped rate gives after headers

# Says what became of a connection over one interface, and no other.
_CONNECT = """
import socket, sys
address, interface, seconds = sys.argv[1:]
with socket.socket() as one:
    one.settimeout(float(seconds))
    one.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())
    try:
        one.connect((address, 5000))
        print("connected")
    except ConnectionRefusedError:
        print("refused")
    except TimeoutError:
        print("no answer")
"""
_LISTEN = """
import socket, sys
with socket.create_server(("", 5000)):
    print("ready", flush=True)
    sys.stdin.read()
"""


@dataclass(frozen=True)
class Check:
    """One thing that was checked: what, what was expected, what was found."""

    what: str
    expected: str
    found: str
    passed: bool

    def __str__(self) -> str:
        return f"{'ok    ' if self.passed else 'FAILED'}  {self.what}: {self.found}, expected {self.expected}"


def check(bed: Testbed, seconds: float = 1.0) -> Iterator[Check]:
    """Check links, then uplinks, then decoys, as much at once as does not disturb each other; windows of `seconds`.

    Raises TestbedError when something is cut or killed: it checks a testbed that is whole.
    """
    if broken := bed.state():
        found = ", ".join(f"{name} is {state}" for name, state in broken.items())
        raise TestbedError(f"a testbed is checked whole, and in {bed.name!r} {found}; start another one")
    yield from _links(bed, seconds)
    yield from _uplinks(bed, seconds)
    yield from _decoys(bed)


def rounds(edges: Sequence[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """The edges in rounds, in each of which every node sends or receives, never both.

    TCP's acknowledgements go the other way; up to 3% of what that way carries would be missing from another flow there.
    """
    found: list[list[tuple[str, str]]] = []
    for edge in edges:
        free = (one for one in found if not any(node in other for node in edge for other in one))
        if (first := next(free, None)) is None:
            found.append(first := [])
        first.append(edge)
    return found


def link_flows(topology: Topology) -> dict[tuple[str, str], float]:
    """Flows within racks that load each host's link once each way, and the goodput expected of each, in bits a second.

    Only flows over a shaped link: what one that is not shaped carries is the machine's affair.
    """
    found = {}
    for rack in topology.racks:
        ring = [*rack.hosts[1:], rack.hosts[0]] if len(rack.hosts) > 1 else []
        for source, target in zip(rack.hosts, ring, strict=False):
            rates = [source.link.up] if source.link else []
            rates += [target.link.down] if target.link else []
            if rates:
                found[source.name, target.name] = PAYLOAD * min(rates)
    return found


def uplink_flows(source: Rack, target: Rack) -> tuple[list[tuple[str, str]], float]:
    """Flows from all hosts of a rack to another, and the goodput expected of all together (inf: nothing is shaped)."""
    flows, into = [], dict.fromkeys(target.hosts, 0.0)
    for index, host in enumerate(source.hosts):
        other = target.hosts[index % len(target.hosts)]
        flows.append((host.name, other.name))
        into[other] += host.link.up if host.link else inf
    bounds = [sum(min(rate, host.link.down if host.link else inf) for host, rate in into.items())]
    bounds += [source.uplink.up] if source.uplink else []
    bounds += [target.uplink.down] if target.uplink else []
    return flows, PAYLOAD * min(bounds)


def _links(bed: Testbed, seconds: float) -> Iterator[Check]:
    expected = link_flows(bed.topology)
    for flows in rounds(list(expected)):
        for (source, target), found in zip(flows, measure(bed, flows, seconds), strict=True):
            yield _rate(f"link {source} -> {target}", expected[source, target], found)


def _uplinks(bed: Testbed, seconds: float) -> Iterator[Check]:
    racks = {rack.name: rack for rack in bed.topology.racks} if bed.topology.has_spine else {}
    names = list(racks)
    for pairs in rounds(list(zip(names, [*names[1:], *names[:1]], strict=True))):
        sets = {pair: uplink_flows(racks[pair[0]], racks[pair[1]]) for pair in pairs}
        sets = {pair: (flows, rate) for pair, (flows, rate) in sets.items() if rate < inf}
        measured = iter(measure(bed, [flow for flows, _ in sets.values() for flow in flows], seconds) if sets else [])
        for (source, target), (flows, rate) in sets.items():
            found = sum(next(measured) for _ in flows)
            yield _rate(f"uplink {source} -> {target}, {len(flows)} flows", rate, found)


def _decoys(bed: Testbed) -> Iterator[Check]:
    """Each host's decoys lead not even to a host that listens, and that is reached over eth0."""
    hosts = bed.topology.hosts
    for index, host in enumerate(hosts):
        number = (index + 1) % len(hosts)
        other = hosts[number].name
        if not host.decoys or len(hosts) == 1:
            continue
        with bed.popen(other, [sys.executable, "-ES", "-c", _LISTEN]) as listener:
            try:
                expect_ready(listener, f"decoys, who listens on {other}")
                honest = _connected(bed, host.name, bed.topology.address(other), "eth0", 5)
                tried = {
                    decoy.name: _connected(bed, host.name, decoy.address(number).partition("/")[0], decoy.name, 0.3)
                    for decoy in host.decoys
                }
            finally:
                listener.kill()
        for name, said in tried.items():
            passed = honest == "connected" and said in ("refused", "no answer")
            expected = "refused or no answer, and over eth0 connected"
            yield Check(f"decoy {name} {host.name} -> {other}", expected, f"{said}, and over eth0 {honest}", passed)


def _connected(bed: Testbed, host: str, address: str, interface: str, seconds: float) -> str:
    """What becomes of a connection: "connected", "refused", "no answer", or why none could be tried."""
    words = [sys.executable, "-ES", "-c", _CONNECT, address, interface, str(seconds)]
    tried = bed.run(host, words)
    said = (tried.stdout or tried.stderr).strip().splitlines()
    return said[-1] if said else f"status {tried.returncode}"


def _rate(what: str, expected: float, found: float) -> Check:
    passed = abs(found / expected - 1) <= TOLERANCE
    return Check(what, f"{format_rate(expected)} ± {TOLERANCE:.0%}", format_rate(found), passed)
