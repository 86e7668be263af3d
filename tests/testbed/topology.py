"""What a virtual cluster looks like: plain data, checked, drawn and shuffled without touching any machine."""

from __future__ import annotations

import ipaddress
import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

# Of a frame of 1514 bytes, TCP's payload with time stamps is 1448; tbf counts the Ethernet header in.
PAYLOAD = 1448 / 1514

NETWORK = ipaddress.IPv4Network("10.77.0.0/24")  # the hosts' own; no decoy may overlap it

# A name becomes an interface's, where Linux allows 15 characters; a rack's gets ".down" behind it, a decoy's ".port".
_HOST_NAME = re.compile(r"[a-z][a-z0-9-]{0,14}")
_RACK_NAME = re.compile(r"[a-z][a-z0-9-]{0,9}")
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)(?:bit(?:/s)?)?", re.IGNORECASE)
_RESERVED = ("lo", "eth0", "spine", "all", "default")  # the kernel takes no interface of the last two names


class TestbedError(Exception):
    """What went wrong with a testbed: what was asked, what was found, what to do."""

    __test__ = False  # the name begins as a test's does, for pytest


@dataclass(frozen=True)
class Rates:
    """What a link carries, in bits a second on the wire: `up` away from the host or the rack, `down` towards it."""

    up: int
    down: int

    def __post_init__(self) -> None:
        if not all(10**5 <= rate <= 10**11 for rate in (self.up, self.down)):
            raise ValueError(f"Rates(up={self.up}, down={self.down}): expected 100 kbit/s to 100 Gbit/s, in bit/s")

    def __str__(self) -> str:
        up, down = format_rate(self.up), format_rate(self.down)
        return up if self.up == self.down else f"{up} up, {down} down"


@dataclass(frozen=True)
class Decoy:
    """An interface of a host that is up, has an address, and leads nowhere.

    With `same` it has one and the same address on every host, as docker0 has: who connects to another host's finds
    itself. Otherwise each host has its own in the network, as on a second card whose switch is not plugged in.
    """

    name: str = "docker0"
    network: str = "172.17.0.0/16"
    same: bool = True

    def __post_init__(self) -> None:
        if not _RACK_NAME.fullmatch(self.name) or self.name in _RESERVED:
            raise ValueError(f"Decoy(name={self.name!r}): expected {_RACK_NAME.pattern}, and not {_RESERVED}")
        if ipaddress.IPv4Network(self.network).overlaps(NETWORK):
            raise ValueError(f"Decoy(network={self.network!r}): overlaps the hosts' own network {NETWORK}")

    def address(self, number: int) -> str:
        """The address with its prefix on the host of this number, which counts from 0."""
        network = ipaddress.IPv4Network(self.network)
        return f"{network[1 if self.same else 1 + number]}/{network.prefixlen}"


@dataclass(frozen=True)
class Host:
    """A host: its name, the rates of its link to the rack's switch (None: not shaped), its decoys."""

    name: str
    link: Rates | None = None
    decoys: tuple[Decoy, ...] = ()

    def __post_init__(self) -> None:
        if not _HOST_NAME.fullmatch(self.name) or self.name in _RESERVED:
            raise ValueError(f"Host(name={self.name!r}): expected {_HOST_NAME.pattern}, and not {_RESERVED}")
        if len({decoy.name for decoy in self.decoys}) < len(self.decoys):
            raise ValueError(f"Host(name={self.name!r}): decoys of one name; expected names of their own")


@dataclass(frozen=True)
class Rack:
    """Hosts on one switch, and the rates of its uplink to the spine, which they share (None: not shaped)."""

    name: str
    hosts: tuple[Host, ...]
    uplink: Rates | None = None

    def __post_init__(self) -> None:
        if not _RACK_NAME.fullmatch(self.name) or self.name in _RESERVED:
            raise ValueError(f"Rack(name={self.name!r}): expected {_RACK_NAME.pattern}, and not {_RESERVED}")
        if not self.hosts:
            raise ValueError(f"Rack(name={self.name!r}, hosts=()): expected one host or more")


@dataclass(frozen=True)
class Topology:
    """Racks of hosts under one spine, and the order in which a host file lists the hosts (empty: rack by rack).

    Addresses follow the order, so that neither names nor addresses of a shuffled topology tell who shares a rack.
    """

    racks: tuple[Rack, ...]
    order: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [host.name for rack in self.racks for host in rack.hosts]
        every = [*names, *(rack.name for rack in self.racks)]
        if repeated := sorted({name for name in every if every.count(name) > 1}):
            raise ValueError(f"Topology: {', '.join(repeated)} named more than once; expected names of their own")
        if not names or len(names) > NETWORK.num_addresses - 2:
            raise ValueError(f"Topology: {len(names)} hosts; expected 1 to {NETWORK.num_addresses - 2}")
        if self.order and sorted(self.order) != sorted(names):
            raise ValueError(f"Topology(order={self.order}): expected each of {names} once")

    @property
    def hosts(self) -> tuple[Host, ...]:
        """All hosts, in the order in which they are listed."""
        by_name = {host.name: host for rack in self.racks for host in rack.hosts}
        return tuple(by_name[name] for name in self.order) if self.order else tuple(by_name.values())

    @property
    def names(self) -> tuple[str, ...]:
        """The hosts' names, in the order in which they are listed."""
        return tuple(host.name for host in self.hosts)

    @property
    def has_spine(self) -> bool:
        """Whether there is a switch above the racks: with one rack there is nothing to connect."""
        return len(self.racks) > 1

    def host(self, name: str) -> Host:
        """The host of this name. Raises TestbedError, which lists the hosts, where there is none."""
        for host in self.hosts:
            if host.name == name:
                return host
        raise TestbedError(f"host {name!r}: there is none of this name; the hosts are {' '.join(self.names)}")

    def rack_of(self, name: str) -> Rack:
        """The rack that a host stands in. Raises TestbedError where there is no such host."""
        host = self.host(name)
        return next(rack for rack in self.racks if host in rack.hosts)

    def address(self, name: str) -> str:
        """A host's address in the cluster's network. Raises TestbedError where there is no such host."""
        return str(NETWORK[1 + self.hosts.index(self.host(name))])

    def shuffled(self, seed: int) -> Topology:
        """The same racks with the hosts' names dealt anew: a listing then goes to and fro between the racks."""
        dealt = iter(random.Random(seed).sample(self.names, len(self.names)))
        racks = tuple(
            replace(rack, hosts=tuple(replace(host, name=next(dealt)) for host in rack.hosts)) for rack in self.racks
        )
        return Topology(racks, self.names)

    def to_json(self) -> str:
        """One line that `from_json` reads back."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Topology:
        """The topology that `to_json` wrote."""
        document = json.loads(text)
        racks = tuple(
            Rack(
                rack["name"],
                tuple(
                    Host(host["name"], _rates(host["link"]), tuple(Decoy(**decoy) for decoy in host["decoys"]))
                    for host in rack["hosts"]
                ),
                _rates(rack["uplink"]),
            )
            for rack in document["racks"]
        )
        return cls(racks, tuple(document["order"]))

    def picture(self, state: Mapping[str, str] | None = None) -> str:
        """The cluster as a tree in ASCII; `state` adds a word to what is not as it was made ("killed", "cut")."""
        state = state or {}
        rows: list[tuple[str, str]] = [("spine", "")] if self.has_spine else []
        for index, rack in enumerate(self.racks):
            last = index == len(self.racks) - 1
            branch, below = ("+-- ", "    " if last else "|   ") if self.has_spine else ("", "")
            about = f"uplink {rack.uplink or 'not shaped'}, shared" if self.has_spine else ""
            rows.append((branch + rack.name, _about(about, state.get(rack.name))))
            for host in rack.hosts:
                about = f"{self.address(host.name)}, link {host.link or 'not shaped'}"
                about += "".join(f", {decoy.name} leads nowhere" for decoy in host.decoys)
                rows.append((f"{below}+-- {host.name}", _about(about, state.get(host.name))))
        width = max(len(left) for left, _ in rows)
        return "\n".join(f"{left:{width}}  {right}".rstrip() for left, right in rows)


def cluster(
    hosts: Sequence[int],
    *,
    link: str | Rates | None = None,
    uplink: str | Rates | None = None,
    decoys: Sequence[Decoy] = (),
    shuffle: int | None = None,
) -> Topology:
    """A regular cluster: `hosts` in each rack (`[2, 2]`: two racks of two), named h0, h1, ... in rack0, rack1, ...

    `link` and `uplink` are rates as `parse_rate` reads them, or Rates; `shuffle` is a seed to deal the names by.
    Raises ValueError, which names the argument.
    """
    if any(count < 1 for count in hosts):
        raise ValueError(f"hosts={list(hosts)}: expected one host or more in each rack")
    numbers = iter(range(sum(hosts)))
    racks = tuple(
        Rack(
            f"rack{index}",
            tuple(Host(f"h{next(numbers)}", _both(link), tuple(decoys)) for _ in range(count)),
            _both(uplink),
        )
        for index, count in enumerate(hosts)
    )
    made = Topology(racks)
    return made if shuffle is None else made.shuffled(shuffle)


def parse_rate(text: str) -> int:
    """Bits a second of "200mbit", "1.5 Gbit/s" or "64k". Raises ValueError for anything else."""
    found = _RATE.fullmatch(text.strip())
    if not found:
        raise ValueError(f"rate {text!r}: expected a number of bits a second, such as 200mbit or 1gbit")
    return round(float(found[1]) * {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}[found[2].lower()])


def format_rate(rate: float) -> str:
    """A rate in bits a second as people write it."""
    for unit, name in ((10**9, "Gbit/s"), (10**6, "Mbit/s")):
        if rate >= unit:
            return f"{rate / unit:.4g} {name}"
    return f"{rate / 1000:.4g} kbit/s"


def _both(rate: str | Rates | None) -> Rates | None:
    if not isinstance(rate, str):
        return rate
    return Rates(parse_rate(rate), parse_rate(rate))


def _rates(document: Mapping[str, int] | None) -> Rates | None:
    return None if document is None else Rates(document["up"], document["down"])


def _about(text: str, state: str | None) -> str:
    return f"{text}  [{state.upper()}]" if state else text
