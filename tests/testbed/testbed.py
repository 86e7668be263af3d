"""A virtual cluster of network namespaces on this machine, for tests:

    with running(cluster([2, 2], link="200mbit", uplink="100mbit")) as bed:
        bed.run("h0", ["mpirun", ...])

docs/testbed.md has the rest. It needs root; `obstacle` says what else is missing.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

from processes import (
    TOOLS,
    Guard,
    Process,
    guard_arguments,
    guard_at,
    guards,
    host_processes,
    keeper,
    keepers,
    kill,
    kill_host,
    state,
)
from topology import Decoy, Host, Rack, Rates, TestbedError, Topology, cluster

__all__ = [
    "AGENT",
    "Decoy",
    "Host",
    "Process",
    "Rack",
    "Rates",
    "Testbed",
    "TestbedError",
    "Topology",
    "cluster",
    "find",
    "obstacle",
    "running",
    "start",
]

HERE = Path(__file__).resolve().parent
AGENT = HERE / "agent.py"
_PYTHON = [sys.executable, "-E", "-S"]  # what runs in a testbed needs the standard library only, and starts faster so
_NEW_NAMESPACES = ["unshare", "--pid", "--net", "--mount", "--ipc", "--uts", "--fork", "--kill-child", "--mount-proc"]
_START_SECONDS = 60
_NAME = re.compile(r"[\w.-]{1,40}")

# Everything that a testbed asks of the kernel, once, in namespaces that end with this script.
_PROBE = """
set -e
ip link add name probe0 type veth peer name probe1
ip link add name probe2 type bridge
tc qdisc add dev probe0 root tbf rate 100mbit burst 32kb latency 50ms
mount -t tmpfs tmpfs /dev/shm
mount -t sysfs sysfs /sys
"""

# Ends when each address has answered, which refusing a connection is; else prints the one that did not in time.
_ASK = """
import socket, sys, time
until = time.monotonic() + float(sys.argv[1])
for address in sys.argv[2:]:
    while True:
        try:
            socket.create_connection((address, 9), 0.2).close()
            break
        except ConnectionRefusedError:
            break
        except OSError:
            if time.monotonic() > until:
                print(address)
                sys.exit(1)
            time.sleep(0.02)
"""


class Testbed:
    """A testbed that runs: what can be done with it. `running` and `start` make one, `find` finds one."""

    __test__ = False  # the name begins as a test's does, for pytest

    def __init__(self, guard: Guard, starter: subprocess.Popen[bytes] | None = None) -> None:
        self._guard = guard
        self._starter = starter  # the guard's parent, where that is our child

    @property
    def name(self) -> str:
        """The name that tells it from other testbeds on this machine."""
        return self._guard.name

    @property
    def topology(self) -> Topology:
        """What it looks like, as it was made."""
        return self._guard.topology

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts' names, in the order in which a host file lists them; killed ones too."""
        return self.topology.names

    def command(
        self,
        host: str,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
    ) -> list[str]:
        """The command line, for this machine, that runs `argv` on a host: as a login there would, but in `cwd`.

        The environment is a login's (see `start`) and `env`; nothing of the caller's comes along. Signals reach the
        command, which is killed when the process of this command line is. Its exit status is the command's; 127 when
        it cannot be started. Raises TestbedError when the host does not exist or was killed.
        """
        added = ["env", *(f"{name}={value}" for name, value in env.items())] if env else []
        place = str(cwd or Path.cwd())
        return [*_PYTHON, str(HERE / "enter.py"), str(self._keeper(host)), place, *added, *map(str, argv)]

    def run(
        self,
        host: str,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        timeout: float | None = 60,
        check: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run `argv` on a host (see `command`) and wait for it, at most `timeout` seconds.

        Raises as `command` does; subprocess.TimeoutExpired, after it killed the command; with `check`,
        subprocess.CalledProcessError.
        """
        return subprocess.run(
            self.command(host, argv, env=env, cwd=cwd),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=check,
        )

    def popen(
        self,
        host: str,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
    ) -> subprocess.Popen[str]:
        """Start `argv` on a host (see `command`), with pipes to and from it. Raises as `command` does."""
        return subprocess.Popen(
            self.command(host, argv, env=env, cwd=cwd),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )

    def hostfile(self, slots: int) -> str:
        """A host file for Open MPI with so many slots on each host, in the topology's order."""
        return "".join(f"{name} slots={slots}\n" for name in self.hosts)

    def processes(self, host: str | None = None) -> list[Process]:
        """What runs on a host, or on all of them, beside the testbed's own. Raises TestbedError: no such host."""
        alive = keepers(self._guard.pid)
        if host is not None:
            self.topology.host(host)
        return [one for name, pid in alive.items() if host in (None, name) for one in host_processes(pid)]

    def kill(self, host: str) -> None:
        """The host loses its power: its link goes down first, so that nobody is told, then all its processes end.

        Raises TestbedError when there is no such host, or it was killed before.
        """
        held = self._keeper(host)
        self._ip("link", "set", "dev", host, "down")
        kill_host(held)
        with suppress(TestbedError):  # the pair ends with the host's namespace, some time later if not already
            self._ip("link", "delete", "dev", host)

    def cut(self, name: str) -> None:
        """Pull the cable of a host, or of a rack's uplink: from now on it carries nothing, and nobody is told.

        Raises TestbedError when there is no such host or uplink, or the host was killed.
        """
        # At the switch's end: a link that is down at the host's end would have lost its routes, and connecting there
        # would fail at once. A cable that is pulled leaves the routes, and silence.
        self._ip("link", "set", "dev", self._port(name), "down")

    def mend(self, name: str) -> None:
        """Put the cable back that `cut` pulled; see `settle`. Raises as `cut` does."""
        self._ip("link", "set", "dev", self._port(name), "up")

    def settle(self, seconds: float = 20) -> None:
        """Wait until every host that lives answers every other: for a moment after `mend` a link still carries nothing.

        Raises TestbedError, which names one that does not answer another within `seconds`.
        """
        dead = self.state()
        alive = {name: self.topology.address(name) for name in self.hosts if dead.get(name) != "killed"}
        with ExitStack() as running:
            asking = {
                name: running.enter_context(self.popen(name, [*_PYTHON, "-c", _ASK, str(seconds), *alive.values()]))
                for name in alive
            }
            for name, process in asking.items():
                address, complaint = process.communicate()
                if process.returncode != 0:
                    silent = [other for other, its in alive.items() if its == address.strip()]
                    why = f"{silent[0]} does not answer within {seconds:g} s" if silent else complaint.strip()
                    raise TestbedError(f"testbed {self.name!r}: on host {name}: {why}")

    def state(self) -> dict[str, str]:
        """Hosts and racks that are not as they were made: "killed" or "cut". Raises TestbedError when it is down."""
        self._expect_running()
        return state(self._guard)

    def picture(self) -> str:
        """The cluster as it is now, as a tree in ASCII."""
        return self.topology.picture(self.state())

    def close(self) -> None:
        """Take it down: when this returns, no process of it is left. Idempotent."""
        try:
            ended = os.pidfd_open(self._guard.pid)
        except ProcessLookupError:
            ended = None
        if ended is not None:
            with os.fdopen(ended) as descriptor:
                if self._runs():
                    kill(self._guard.pid)  # the kernel kills the rest, and lets the guard end only after them
                    select.select([descriptor], [], [])
        if self._starter is not None:
            self._starter.wait()

    def _runs(self) -> bool:
        found = guard_at(self._guard.pid)
        return found is not None and found.name == self.name  # its number may have become another process's

    def _expect_running(self) -> None:
        if not self._runs():
            raise TestbedError(f"testbed {self.name!r} is down; start another one")

    def _keeper(self, host: str) -> int:
        self._expect_running()
        return keeper(self._guard, host)

    def _port(self, name: str) -> str:
        racks = [rack.name for rack in self.topology.racks] if self.topology.has_spine else []
        if name in racks:
            return f"{name}.up"
        if name not in self.hosts:
            known = " ".join([*self.hosts, *racks])
            raise TestbedError(f"link {name!r}: there is no host and no rack with an uplink of this name, only {known}")
        self._keeper(name)
        return name

    def _ip(self, *words: str) -> None:
        done = subprocess.run(
            ["nsenter", f"--net=/proc/{self._guard.pid}/ns/net", "ip", *words],
            env=TOOLS,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise TestbedError(f"testbed {self.name!r}: ip {' '.join(words)} failed: {done.stderr.strip()}")


@contextmanager
def running(
    topology: Topology, *, name: str | None = None, environment: Mapping[str, str] | None = None
) -> Iterator[Testbed]:
    """A testbed for the time of a `with`: it ends with the block, and with this process, in whatever way that ends.

    Arguments and errors: see `start`.
    """
    bed = start(topology, name=name, environment=environment)
    try:
        yield bed
    finally:
        bed.close()


def start(
    topology: Topology,
    *,
    name: str | None = None,
    environment: Mapping[str, str] | None = None,
    detached: bool = False,
) -> Testbed:
    """Make a testbed that lasts until its `close`, at most as long as this process; `detached`: without an owner.

    `environment` is added to what a login on a host gets: HOME, USER, SHELL, LANG, TMPDIR (the host's own), and a PATH
    that begins where this Python lies. Raises TestbedError when this machine cannot have a testbed (the words of
    `obstacle`), when the name is taken, or with the message of the tool that failed; nothing stays behind then.
    """
    name = name or f"bed-{os.getpid()}-{os.urandom(4).hex()}"
    if not _NAME.fullmatch(name):
        raise TestbedError(f"name {name!r}: expected 1 to 40 letters, digits, dots and dashes")
    if reason := obstacle():
        raise TestbedError(reason)
    if any(guard.name == name for guard in guards()):
        raise TestbedError(f"testbed {name!r} runs already; choose another name, or take it down first")
    owner = None if detached else os.pidfd_open(os.getpid())
    try:
        starter = subprocess.Popen(
            [*_NEW_NAMESPACES, *_PYTHON, str(HERE / "guard.py"), *guard_arguments(name, topology, owner)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=_login() | dict(environment or {}),
            pass_fds=[] if owner is None else [owner],
            cwd="/",  # keeps no folder of the caller's in use
            start_new_session=True,  # a terminal's Ctrl-C is for the owner, which then takes the testbed down
        )
    finally:
        if owner is not None:
            os.close(owner)
    found = None
    try:
        said = _answer(starter)
        found = next((guard for guard in guards() if guard.name == name), None)
        if said != "ready" or found is None:
            raise TestbedError(f"testbed {name!r} did not come up: {said or 'its guard was killed'}")
    except BaseException:
        starter.kill()  # and with it, by --kill-child, the guard
        starter.wait()
        if found is not None:
            Testbed(found).close()
        raise
    return Testbed(found, starter)


def find(name: str | None = None) -> Testbed:
    """A testbed that runs on this machine, by its name; without one, the only one. Raises TestbedError."""
    running = guards()
    chosen = [guard for guard in running if name in (None, guard.name)]
    if len(chosen) == 1:
        return Testbed(chosen[0])
    names = ", ".join(guard.name for guard in running) or "none"
    asked = "a testbed was asked for without its name" if name is None else f"testbed {name!r} was asked for"
    raise TestbedError(f"{asked}; running: {names}")


@cache
def obstacle() -> str | None:
    """Why this machine cannot have a testbed, in one line; None where it can. Found once, by trying."""
    if sys.platform != "linux":
        return f"a testbed needs Linux's namespaces, and this is {sys.platform}"
    if os.geteuid() != 0:
        return "a testbed needs root, to make network namespaces"
    for tool, package in {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "bash": "bash"}.items():
        if shutil.which(tool, path=TOOLS["PATH"]) is None:
            return f"a testbed needs {tool}, which is not installed (Debian: package {package})"
    probe = subprocess.run(
        [*_NEW_NAMESPACES, "sh", "-c", _PROBE],
        env=TOOLS,
        capture_output=True,
        text=True,
        check=False,
    )
    if probe.returncode != 0:
        said = " ".join(probe.stderr.split())
        return f"a testbed needs namespaces, veth, bridges and tbf, and the kernel refuses: {said}"
    return None


def _answer(starter: subprocess.Popen[bytes]) -> str:
    """What the guard says: "ready", or what went wrong."""
    assert starter.stdout is not None
    with starter.stdout as pipe:
        said = b""
        while said != b"ready\n":
            if not select.select([pipe], [], [], _START_SECONDS)[0]:
                raise TestbedError(f"the guard did not answer within {_START_SECONDS} s; it said {said.decode()!r}")
            if not (more := os.read(pipe.fileno(), 65536)):
                break
            said += more
    return said.decode(errors="replace").strip()


def _login() -> dict[str, str]:
    """The environment of a login on a host: what sshd and a profile would set there, and nothing of ours."""
    return {
        "HOME": os.environ.get("HOME", "/"),
        "USER": "root",
        "LOGNAME": "root",
        "SHELL": "/bin/sh",
        "LANG": "C.UTF-8",
        "TMPDIR": "/run/tmp",
        "PATH": f"{Path(sys.executable).parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    }
