"""The processes of a testbed, found in /proc: there is no file about a running testbed that could outlive it.

A testbed is a process namespace. Its first process, the guard (guard.py), carries name and topology on its command
line; each host has a keeper, a process that sleeps and holds the host's namespaces. When the guard ends, the kernel
ends every process of the namespace, and with the last of them all interfaces and mounts.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from topology import TestbedError, Topology

Kind = Literal["net", "uts", "ipc", "mnt", "pid"]

HOST_KINDS: tuple[Kind, ...] = ("net", "uts", "ipc", "mnt")  # what a host has of its own; mnt last, it changes /proc

KEEPER_NAME = "testbed-host {}"  # a keeper's whole argv[0]
# Where the testbed finds its own tools: a user's PATH often leaves sbin out, and a host's PATH is the host's affair.
TOOLS = {"PATH": f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin", "LC_ALL": "C"}

_GUARD_MARK = "testbed"
_IFF_UP = 1


@dataclass(frozen=True)
class Process:
    """A process: its number as seen from here, and its command line."""

    pid: int
    command: str


@dataclass(frozen=True)
class Guard:
    """A testbed's first process: its number as seen from here, and what its command line says of the testbed."""

    pid: int
    name: str
    topology: Topology


def guard_arguments(name: str, topology: Topology, owner: int | None) -> list[str]:
    """The arguments of guard.py; `owner` is a descriptor that becomes readable when the testbed's owner has ended."""
    return [_GUARD_MARK, name, topology.to_json(), "-" if owner is None else str(owner)]


def guards() -> list[Guard]:
    """Every testbed that runs on this machine, by its guard, the oldest first. Only root sees other users'."""
    return [guard for pid in _pids() if (guard := guard_at(pid))]


def guard_at(pid: int) -> Guard | None:
    """What the process is the guard of; None when it is none."""
    words = _arguments(pid)
    if len(words) < 5 or words[-4] != _GUARD_MARK or Path(words[-5]).name != "guard.py":
        return None
    # The `unshare` that started the guard has the same words, but is not the first process of any namespace.
    numbers = [line.split()[1:] for line in _text(f"/proc/{pid}/status").splitlines() if line.startswith("NSpid:")]
    if not numbers or numbers[0][-1] != "1":
        return None
    return Guard(pid, words[-3], Topology.from_json(words[-2]))


def keepers(guard: int) -> dict[str, int]:
    """The keepers of the hosts that are not killed, by their names."""
    inside = _namespace(guard, "pid")
    found = {}
    for pid in _pids():
        kind, _, name = next(iter(_arguments(pid)), "").partition(" ")
        if f"{kind} {{}}" == KEEPER_NAME and inside and _namespace(pid, "pid") == inside:
            found[name] = pid
    return found


def keeper(guard: Guard, host: str) -> int:
    """The keeper of one host. Raises TestbedError when the host does not exist, or was killed."""
    guard.topology.host(host)
    found = keepers(guard.pid).get(host)
    if found is None:
        raise TestbedError(f"host {host!r}: it was killed; a killed host does not come back, start a new testbed")
    return found


def host_processes(keeper: int) -> list[Process]:
    """What runs on a host beside its keeper. Whoever was started there is there, whatever became of its parents."""
    inside = _namespace(keeper, "net")
    return [
        Process(pid, " ".join(_arguments(pid)))
        for pid in _pids()
        if inside and pid != keeper and _namespace(pid, "net") == inside
    ]


def state(guard: Guard) -> dict[str, str]:
    """Hosts and racks that are not as they were made: "killed" or "cut"."""
    alive = keepers(guard.pid)
    # The guard's /sys shows the fabric's interfaces, and can be read through /proc from everywhere.
    fabric = Path(f"/proc/{guard.pid}/root", "sys/class/net")
    found = {name: "killed" for name in guard.topology.names if name not in alive}
    for rack in guard.topology.racks:
        ports = {host.name: host.name for host in rack.hosts}
        if guard.topology.has_spine:
            ports[rack.name] = f"{rack.name}.up"
        for name, port in ports.items():
            flags = _text(f"{fabric}/{port}/flags")
            if name not in found and not int(flags or "0", 16) & _IFF_UP:
                found[name] = "cut"
    return found


def kill_host(keeper: int, seconds: float = 10) -> None:
    """Kill every process of a host, the keeper first, so that nobody can enter any more.

    Raises TestbedError when one is still there after `seconds`.
    """
    inside = _namespace(keeper, "net")
    deadline = time.monotonic() + seconds
    while left := [pid for pid in [keeper, *_pids()] if inside and _namespace(pid, "net") == inside]:
        for pid in left:
            kill(pid)
        if time.monotonic() > deadline:
            raise TestbedError(f"killed a host, but {len(left)} of its processes remain after {seconds} s: {left}")
        time.sleep(0.001)  # a killed process needs the processor once more to end


def kill(pid: int) -> None:
    """SIGKILL to a process that may have ended already."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def join(pid: int, kinds: tuple[Kind, ...]) -> None:
    """Enter namespaces of a process, as nsenter does; of kind "pid" it is the next child that enters.

    Raises OSError: no such process, or not root.
    """
    # Opened before the first is entered, because afterwards /proc may be another's. (os.setns came with Python 3.12.)
    libc = ctypes.CDLL(None, use_errno=True)
    opened = [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in kinds]
    try:
        for descriptor in opened:
            if libc.setns(descriptor, 0) != 0:
                number = ctypes.get_errno()
                raise OSError(number, f"setns: {os.strerror(number)}")
    finally:
        for descriptor in opened:
            os.close(descriptor)


def reset_signals() -> None:
    """Before an exec: what is ignored it passes on, and Python ignores some signals from its start, nohup and a shell's
    background others."""
    for signo in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(signo) == signal.SIG_IGN:
            signal.signal(signo, signal.SIG_DFL)


def environment(pid: int) -> dict[str, str]:
    """The environment that a process was started with."""
    pairs = (entry.partition("=") for entry in _text(f"/proc/{pid}/environ").split("\0") if "=" in entry)
    return {name: value for name, _, value in pairs}


def _pids() -> Iterator[int]:
    return iter(sorted(int(name) for name in os.listdir("/proc") if name.isdigit()))


def _arguments(pid: int) -> list[str]:
    return _text(f"/proc/{pid}/cmdline").removesuffix("\0").split("\0")


def _namespace(pid: int, kind: Kind) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    except OSError:  # it has ended, or is another user's
        return None


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="surrogateescape")
    except OSError:
        return ""
