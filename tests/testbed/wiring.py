"""What makes a topology real: the scripts for `ip` and `tc`, and the files of each host. Text only; nothing runs here.

All switches are bridges in one network namespace, the fabric. A host's port in it has the host's name; its other end
is eth0 in the host. A rack's uplink is a pair too: RACK.up on the rack's bridge, RACK.down on the spine's.
"""

from __future__ import annotations

from collections.abc import Iterator

from topology import NETWORK, Host, Topology

# A frame waits at most so long in front of a link: the switch's buffer. TCP fills it, and what is over is dropped.
QUEUE_MS = 20

# TCP hands over segments of at most this size (`gso_max_size`). One that is larger than what a link lets pass at once
# (below) would be cut into frames by the kernel, one by one, which takes its time.
SEGMENT_BYTES = 16 * 1024

# What a link that was idle lets pass at once, in milliseconds of its rate. More would let small messages by unshaped;
# less, and a timer of the kernel's that comes late on a busy machine costs a fast link what it could have sent.
BURST_MS = 1.0


def fabric_links(topology: Topology) -> str:
    """The `ip -batch` script, in the fabric's namespace, that makes the switches and the uplinks."""
    lines = ["link set dev lo up"]
    if topology.has_spine:
        lines += ["link add name spine type bridge", "link set dev spine up"]
    for rack in topology.racks:
        lines += [f"link add name {rack.name} type bridge", f"link set dev {rack.name} up"]
        if topology.has_spine:
            up, down = f"{rack.name}.up", f"{rack.name}.down"
            lines += [
                f"link add name {up} type veth peer name {down}",
                f"link set dev {up} master {rack.name} up gso_max_size {SEGMENT_BYTES}",
                f"link set dev {down} master spine up gso_max_size {SEGMENT_BYTES}",
            ]
    return _script(lines)


def plug_in(topology: Topology, host: Host, process: int) -> str:
    """The `ip -batch` script, in the fabric's namespace, that gives the host of `process` its eth0."""
    rack = topology.rack_of(host.name)
    return _script(
        [
            f"link add name {host.name} type veth peer name eth0 netns {process}",
            f"link set dev {host.name} master {rack.name} up gso_max_size {SEGMENT_BYTES}",
        ]
    )


def host_decoys(topology: Topology, host: Host) -> str:
    """The `ip -batch` script, in the host's namespace, that makes its decoys.

    It runs before eth0 is plugged in: then a program that takes the first interface it finds takes a decoy.
    """
    lines = ["link set dev lo up"]
    number = topology.hosts.index(host)
    for decoy in host.decoys:
        name = decoy.name
        lines += [
            f"link add name {name} type bridge",
            # A bridge without a port has no carrier, and careful programs pass it by; a container would be a port.
            f"link add name {name}.port type veth peer name {name}.end",
            f"link set dev {name}.end up",
            f"link set dev {name}.port master {name} up",
            f"address add {decoy.address(number)} dev {name}",
            f"link set dev {name} up",
        ]
    return _script(lines)


def host_links(topology: Topology, host: Host) -> str:
    """The `ip -batch` script, in the host's namespace, that gives its eth0 the host's address."""
    return _script(
        [
            f"address add {topology.address(host.name)}/{NETWORK.prefixlen} dev eth0",
            f"link set dev eth0 up gso_max_size {SEGMENT_BYTES}",
        ]
    )


def fabric_rates(topology: Topology) -> str:
    """The `tc -batch` script, in the fabric's namespace, for what goes down to hosts and over uplinks."""
    return _script(_fabric_rates(topology))


def host_rates(host: Host) -> str:
    """The `tc -batch` script, in the host's namespace, for what goes up from it."""
    return _script([_shape("eth0", host.link.up)] if host.link else [])


def host_files(topology: Topology, host: Host, machine_files: dict[str, str]) -> dict[str, str]:
    """The host's own files of /etc by their names; `machine_files` holds the machine's. What it lacks stays lacking."""
    hosts = ["127.0.0.1 localhost", *(f"{topology.address(name)} {name}" for name in topology.names)]
    own = {"hosts": _script(hosts), "hostname": f"{host.name}\n"}
    if "nsswitch.conf" in machine_files:
        # No name service can be reached from here; who asks for a host that does not exist shall hear so at once.
        lines = machine_files["nsswitch.conf"].splitlines()
        own["nsswitch.conf"] = _script(["hosts: files" if line.startswith("hosts:") else line for line in lines])
    return {name: text for name, text in own.items() if name in machine_files}


def _fabric_rates(topology: Topology) -> Iterator[str]:
    for rack in topology.racks:
        if topology.has_spine and rack.uplink:
            yield _shape(f"{rack.name}.up", rack.uplink.up)
            yield _shape(f"{rack.name}.down", rack.uplink.down)
        for host in rack.hosts:
            if host.link:
                yield _shape(host.name, host.link.down)


def _shape(interface: str, rate: int) -> str:
    burst = max(SEGMENT_BYTES + 2048, round(rate / 8 * BURST_MS / 1000))
    return f"qdisc add dev {interface} root tbf rate {rate}bit burst {burst}b latency {QUEUE_MS}ms"


def _script(lines: list[str] | Iterator[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
