"""Strangers at every port that a job of `ddlrun` opens, while it starts and while it runs, and what became of the job.

    python tests/ddl/faults/strangers.py campaign

Each connects to every port as soon as it is there, and says garbage, or nothing, or a byte now and then, or floods it.
The jobs are on a virtual cluster, where no other program listens: it needs root, see docs/testbed.md.
"""

from __future__ import annotations

import itertools
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "tests/testbed")] if __name__ == "__main__" else []

PROGRAM = ROOT / "tests/ddl/programs/strangers.py"
KINDS = ("garbage", "silence", "drip", "flood")
MOMENTS = ("start", "run")
# Who: another user of the host, the same user, a host in the network that is not in the job.
JOBS = (("h0", "user"), ("h0", "self"), ("h0", "network"), ("h0,h1", "network"))
NOBODY = 65534
RUN_SECONDS = 6.0
DRIP_SECONDS = 2.0  # from one byte of a connection to its next
TIMEOUT_SECONDS = 20  # DDL_TIMEOUT
LIMIT_SECONDS = 60.0  # from the start of ddlrun to its end, however the job fares


@dataclass(frozen=True)
class Attack:
    """An attack: what is sent, when, by whom, to a job on which hosts."""

    kind: str
    moment: str
    hosts: str
    who: str

    def __str__(self) -> str:
        return f"{self.kind} at {self.moment} by {self.who} on {self.hosts}"


@dataclass
class Outcome:
    """The fate of a job; `problems` says which promises were broken."""

    attack: Attack
    status: int | None = None
    seconds: float = 0.0
    ports: int = 0  # that were tried
    addresses: set[str] = field(default_factory=set)  # at which the job listened
    connected: int = 0
    refused: int = 0  # ports that could not be connected to
    problems: list[str] = field(default_factory=list)
    output: str = ""


def attacks() -> list[Attack]:
    """Each kind at each moment by each stranger."""
    return [Attack(kind, moment, *job) for kind, moment, job in itertools.product(KINDS, MOMENTS, JOBS)]


def listening() -> set[tuple[str, int]]:
    """The addresses and ports at which this host's processes listen."""
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":
                address, _, port = words[1].rpartition(":")
                found.add((_address(address), int(port, 16)))
    return found


def _address(text: str) -> str:
    """An address as the kernel prints it: words of four bytes, each as this machine stores a number."""
    raw = b"".join(int(text[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(text), 8))
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw)


def watch() -> None:
    """Print each port of this host as soon as it is there; `stop` on stdin ends it."""
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    known: set[tuple[str, int]] = set()
    while True:
        now = listening()
        for address, port in sorted(now - known):
            print(address, port, flush=True)
        known = now
        time.sleep(0.003)


def attack(kind: str, user: int) -> None:
    """For each `ADDRESS PORT` on stdin: attack it; print whether it could be connected to. Holds what it has opened."""
    "".encode("idna")  # which a connection needs, and another user could not read from this Python's folder
    if user:
        os.setgroups([])
        os.setuid(user)
    kept: list[socket.socket] = []
    if kind == "drip":
        threading.Thread(target=_drip, args=(kept,), daemon=True).start()
    for line in sys.stdin:
        address, port = line.split()
        address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address.removeprefix("::ffff:"))
        opened = 0
        with suppress(OSError):
            for _ in range({"garbage": 2, "silence": 3, "drip": 3, "flood": 50}[kind]):
                one = socket.create_connection((address, int(port)), 2)
                kept.append(one)
                opened += 1
                _say(kind, one)
        print(address, port, opened, flush=True)


def _say(kind: str, one: socket.socket) -> None:
    one.setblocking(False)
    with suppress(OSError):
        if kind == "garbage":
            one.send(os.urandom(4096))
        for _ in range(64 if kind == "flood" else 0):
            one.send(os.urandom(65536))


def _drip(connections: Sequence[socket.socket]) -> None:
    while True:
        for one in tuple(connections):
            with suppress(OSError):
                one.send(os.urandom(1))
        time.sleep(DRIP_SECONDS)


def run(one: Attack) -> Outcome:
    """Start a job, let the stranger loose on it, and see how it ends."""
    from testbed import AGENT, cluster, running

    outcome = Outcome(one)
    python = sys.executable
    with running(cluster([3], link="1gbit")) as bed:
        hosts = one.hosts.split(",")
        environment = {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PRTE_MCA_plm_ssh_agent": str(AGENT),
            "DDL_TIMEOUT": str(TIMEOUT_SECONDS),
        }
        from_host = "h2" if one.who == "network" else "h0"
        user = NOBODY if one.who == "user" else 0
        stranger = bed.popen(from_host, [python, __file__, "attack", one.kind, str(user)])
        watchers = {host: bed.popen(host, [python, __file__, "watch"]) for host in hosts}
        time.sleep(1)  # they are Python programs, and the job is not to wait for them
        begin = time.monotonic()
        words = ["-np", "2"] if len(hosts) == 1 else ["-H", one.hosts]
        ddlrun = [Path(python).with_name("ddlrun"), *words, python, PROGRAM, str(RUN_SECONDS)]
        job = bed.popen("h0", ddlrun, env=environment)
        lines: list[str] = []
        readers = [_read(job.stdout, lines.append), _read(job.stderr, lines.append)]

        def loose(host: str, line: str) -> None:
            address, port = line.split()
            outcome.addresses.add(address)
            # From another host each port is tried, also those of the loopback interface.
            target = bed.topology.address(host) if from_host not in hosts else address
            if one.moment == "run":
                _until(lambda: sum("is in" in said for said in lines) == 2 or job.poll() is not None)
            with suppress(OSError, ValueError):
                assert stranger.stdin is not None
                stranger.stdin.write(f"{target} {port}\n")
                stranger.stdin.flush()

        def count(line: str) -> None:
            opened = int(line.split()[2])
            outcome.ports += 1
            outcome.connected += opened
            outcome.refused += not opened

        for host, watcher in watchers.items():
            _read(watcher.stdout, lambda line, host=host: loose(host, line))  # type: ignore[misc]
        _read(stranger.stdout, count)
        with suppress(subprocess.TimeoutExpired):
            outcome.status = job.wait(LIMIT_SECONDS)
        outcome.seconds = time.monotonic() - begin
        left = [process.command for process in bed.processes() if str(PROGRAM) in process.command]
        if outcome.status is None:
            outcome.problems.append(f"no end after {LIMIT_SECONDS:.0f} s")
            left = []
        for process in (job, stranger, *watchers.values()):
            process.kill()
        for reader in readers:
            reader.join(5)
        outcome.output = "".join(lines)
        judge(outcome, left)
    return outcome


def judge(outcome: Outcome, left: Sequence[str] = ()) -> None:
    """Add which promises the job broke."""
    right = re.findall(r"rank (\d): \d+ right sums", outcome.output)
    named = re.search(r"(rank \d|host h\d)", outcome.output)
    if "a wrong sum" in outcome.output:
        outcome.problems.append("a wrong sum")
    if outcome.status == 0 and len(right) != 2:
        outcome.problems.append("status 0, and not every rank has finished")
    if outcome.status not in (0, None):
        # Inside the network that must be trusted a job may be ended, but not without a word of whom it happened to.
        trusted = outcome.attack.who == "self" or len(outcome.attack.hosts.split(",")) > 1
        if not trusted:
            outcome.problems.append(f"status {outcome.status}")
        elif not named:
            outcome.problems.append("no rank or host is named")
    if left:
        outcome.problems.append(f"left: {', '.join(left)}")
    one_host = "," not in outcome.attack.hosts
    for address in outcome.addresses:
        if address in ("0.0.0.0", "::") or (one_host and not address.startswith(("127.", "::1", "::ffff:127."))):
            outcome.problems.append(f"it listened at {address}")


def _read(stream: Iterable[str] | None, use: Callable[[str], object]) -> threading.Thread:
    def follow(lines: Iterable[str]) -> None:
        with suppress(ValueError):
            for line in lines:
                use(line)

    thread = threading.Thread(target=follow, args=(stream or (),), daemon=True)
    thread.start()
    return thread


def _until(done: Callable[[], bool], seconds: float = 40) -> None:
    until = time.monotonic() + seconds
    while not done() and time.monotonic() < until:
        time.sleep(0.02)


def table(outcomes: Iterable[Outcome]) -> Iterator[str]:
    """Lines of a Markdown table."""
    yield "| strangers | moment | job on | by | ports | refused | connections | end | seconds | broken promises |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for one in outcomes:
        its = one.attack
        end = "right sums" if one.status == 0 else "none" if one.status is None else f"status {one.status}, named"
        yield (
            f"| {its.kind} | {its.moment} | {its.hosts} | {its.who} | {one.ports} | {one.refused} | {one.connected} "
            f"| {end} | {one.seconds:.1f} | {'; '.join(one.problems) or 0} |"
        )


def campaign(say: Callable[[str], object]) -> list[Outcome]:
    """Run all attacks, one after the other."""
    outcomes = []
    for one in attacks():
        outcomes.append(run(one))
        say(f"{one}: {outcomes[-1].status} after {outcomes[-1].seconds:.1f} s {outcomes[-1].problems}")
    return outcomes


if __name__ == "__main__":
    if sys.argv[1] == "watch":
        watch()
    elif sys.argv[1] == "attack":
        attack(sys.argv[2], int(sys.argv[3]))
    else:
        found = campaign(lambda line: print(line, file=sys.stderr, flush=True))
        print("\n".join(table(found)))
        sys.exit(any(one.problems for one in found))
