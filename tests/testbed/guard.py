"""The first process of a testbed: builds it, says so, and waits; when it ends, the kernel takes all of it down.

testbed.py starts it in new namespaces as `guard.py testbed NAME TOPOLOGY OWNER`. OWNER is the number of a process
descriptor (pidfd) of the process that the testbed belongs to: it becomes readable when that process ends, in whatever
way, and no child that the owner forked can keep it from doing so, as a pipe's other end could. "-": until it is killed.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import wiring
from processes import KEEPER_NAME, TOOLS, keepers
from topology import Host, TestbedError, Topology

# Runs in a host's new namespaces and becomes its keeper, whose environment is a login's. Arguments: the host's name, a
# login's PATH, then name and text of each file that the host has of its own in /etc. /run is its own because sockets of
# the machine's services lie there.
_KEEPER = f"""
set -eu
name=$1
path=$2
shift 2
echo "$name" >/proc/sys/kernel/hostname
# Only what we address ourselves: else every interface, decoys too, would have an address of IPv6's own making.
[ ! -d /proc/sys/net/ipv6 ] || echo 1 >/proc/sys/net/ipv6/conf/all/disable_ipv6
# Figures from two machines shall compare. Of TCP's controls only reno is allowed in a namespace by every kernel; over
# links as short as these cubic, which most clusters run, keeps to its rate.
echo reno >/proc/sys/net/ipv4/tcp_congestion_control
mount -t tmpfs -o mode=755 tmpfs /run
mkdir --mode=1777 /run/tmp
mkdir /run/etc
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
mount -t sysfs -o ro sysfs /sys # shows the interfaces of the host, and not the machine's
while [ $# -gt 0 ]; do
    printf %s "$2" >"/run/etc/$1"
    mount --bind "/run/etc/$1" "/etc/$1"
    shift 2
done
sleep=$(command -v sleep)
PATH=$path # a login's, from here on
echo ready
exec -a "{KEEPER_NAME.format("$name")}" "$sleep" infinity >/dev/null 2>&1
"""


def main() -> int:
    """Build, print "ready" or what is wrong, wait for the owner's end."""
    _, _, document, owner = sys.argv[1:]  # as processes.guard_arguments makes them
    topology = Topology.from_json(document)
    try:
        build(topology)
    except (TestbedError, OSError) as error:
        print(error, flush=True)
        return 1
    # From here on the kernel buries the orphans, which become ours because we are the first process.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    if owner == "-":
        while True:
            signal.pause()
    select.select([int(owner)], [], [])
    return 0


def build(topology: Topology) -> None:
    """Make the switches, the hosts and the links. Raises TestbedError with what the tool that failed said."""
    _tool(["mount", "-t", "sysfs", "-o", "ro", "sysfs", "/sys"])
    if Path("/proc/sys/net/ipv6").is_dir():
        Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1")
    _tool(["ip", "-batch", "-"], wiring.fabric_links(topology))
    for host in topology.hosts:
        inside = ["nsenter", f"--net=/proc/{(process := _keep(topology, host))}/ns/net"]
        _tool([*inside, "ip", "-batch", "-"], wiring.host_decoys(topology, host))
        _tool(["ip", "-batch", "-"], wiring.plug_in(topology, host, process))
        _tool([*inside, "ip", "-batch", "-"], wiring.host_links(topology, host))
        _tool([*inside, "tc", "-batch", "-"], wiring.host_rates(host))
    _tool(["tc", "-batch", "-"], wiring.fabric_rates(topology))
    deadline = time.monotonic() + 5
    while set(keepers(os.getpid())) != set(topology.names):  # the last may still be about to take its name
        if time.monotonic() > deadline:
            raise TestbedError(f"hosts {' '.join(topology.names)}: only {' '.join(keepers(1)) or 'none'} came up")
        time.sleep(0.001)


def _keep(topology: Topology, host: Host) -> int:
    """Start a host's keeper, and return its number when its namespaces and mounts are made."""
    machine = {
        name: Path("/etc", name).read_text()
        for name in ("hosts", "hostname", "nsswitch.conf")
        if Path("/etc", name).is_file()
    }
    files = wiring.host_files(topology, host, machine)
    words = [word for pair in files.items() for word in pair]
    namespaces = ["--net", "--uts", "--ipc", "--mount"]
    keeper = subprocess.Popen(
        ["unshare", *namespaces, "bash", "-c", _KEEPER, "keeper", host.name, os.environ["PATH"], *words],
        env=os.environ | {"PATH": TOOLS["PATH"]},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert keeper.stdout is not None
    with keeper.stdout as lines:
        said = lines.readline().strip()
        if said != "ready":
            raise TestbedError(f"host {host.name!r} could not be made: {said} {lines.read().strip()}")
    return keeper.pid


def _tool(command: list[str], script: str | None = None) -> None:
    if script == "":
        return
    done = subprocess.run(
        command, input=script, env=TOOLS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode != 0:
        raise TestbedError(f"{' '.join(command)} failed: {done.stdout.strip()}; it was asked for:\n{script or ''}")


if __name__ == "__main__":
    sys.exit(main())
