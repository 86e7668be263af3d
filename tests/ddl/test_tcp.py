"""Jobs that no MPI started: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and messages over TCP."""

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

import pytest

PROGRAMS = Path(__file__).parent / "programs"
Run = Callable[..., subprocess.CompletedProcess[str]]


def test_collectives_are_right_without_shared_memory(tcp_ranks: Run) -> None:
    mode = "r:2x2 -shared_memory 0"
    done = tcp_ranks(4, "sweep.py", "4", "host", mode, timeout=100)
    assert done.returncode == 0, done.stdout
    assert f"-mode {mode}: right" in done.stdout


def test_a_rank_that_makes_no_call_hardly_wakes(tcp_ranks: Run) -> None:
    done = tcp_ranks(2, "idle.py")
    assert done.returncode == 0, done.stdout
    found = re.findall(r"woke (\S+) times a second, ran (\S+) s", done.stdout)
    assert len(found) == 2, done.stdout
    for rate, seconds in found:
        assert float(rate) < 10, "it computes, and each wake takes time from that"
        assert float(seconds) < 0.3


def test_mode_m_says_that_it_needs_mpi(tcp_ranks: Run) -> None:
    done = tcp_ranks(2, "init.py", timeout=40, DDL_OPTIONS="-mode m")
    assert done.stdout.count("this job runs over TCP") == 2, done.stdout


def test_a_rank_that_does_not_come_is_named(command: Run) -> None:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29613"}
    program = PROGRAMS / "init.py"
    done = command([sys.executable, program], timeout=40, RANK="0", WORLD_SIZE="2", DDL_TIMEOUT="2", **address)
    assert "rank 0 has waited 2 s for rank 1" in done.stdout, done.stdout


def test_an_address_that_does_not_resolve_is_named(command: Run) -> None:
    address = {"MASTER_ADDR": "no.such.host.invalid", "MASTER_PORT": "29613"}
    done = command([sys.executable, PROGRAMS / "init.py"], timeout=40, RANK="0", WORLD_SIZE="2", **address)
    text = "listen at MASTER_ADDR:MASTER_PORT, because 'no.such.host.invalid' does not resolve ("
    assert text in done.stdout, done.stdout
    assert "No such file" not in done.stdout


def test_an_address_may_be_in_brackets(tcp_ranks: Run) -> None:
    done = tcp_ranks(2, "init.py", MASTER_ADDR="[127.0.0.1]", timeout=40)  # as IPv6 ones are, which not all hosts have
    assert done.returncode == 0, done.stdout


def test_ranks_of_different_sizes_are_told_both() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAMS / "init.py")],
            env=shared | {"RANK": str(rank), "WORLD_SIZE": size, "DDL_TRANSPORT": "tcp"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, size in enumerate(("2", "3"))
    ]
    for one in processes:
        said = one.communicate(timeout=60)[0]
        assert "MismatchError: ddl_init: rank 0 is one of 2 ranks, but rank 1 is one of 3" in said, said


def test_ranks_meet_at_a_port_of_their_own(tcp_ranks: Run, command: Run) -> None:
    with socket.socket() as taken, socket.socket() as free:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        free.bind(("127.0.0.1", 0))
        own, others = free.getsockname()[1], taken.getsockname()[1]
        free.close()
        done = tcp_ranks(2, "init.py", MASTER_PORT=str(others), DDL_RENDEZVOUS=f"localhost:{own}")
        assert done.returncode == 0, done.stdout
    for place in ("127.0.0.1", "127.0.0.1:", "127.0.0.1:x", ":1:99999"):
        program = [sys.executable, PROGRAMS / "init.py"]
        done = command(program, timeout=40, RANK="0", WORLD_SIZE="2", DDL_RENDEZVOUS=place)
        assert "ddl_init: the port of DDL_RENDEZVOUS is '" in done.stdout, done.stdout


@pytest.mark.parametrize("secrets", [("xyzzy", "xyzzy"), ("xyzzy", ""), ("x" * 80 + "y", "x" * 80 + "z")])
def test_ranks_with_other_secrets_stay_out(secrets: tuple[str, str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{free.getsockname()[1]}"
    shared = {**os.environ, "WORLD_SIZE": "2", "DDL_TIMEOUT": "3", "DDL_RENDEZVOUS": place, "DDL_TRANSPORT": "tcp"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROGRAMS / "init.py")],
            env=shared | {"RANK": str(rank), "DDL_SECRET": secret},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, secret in enumerate(secrets)
    ]
    said = [one.communicate(timeout=60)[0] for one in processes]
    if secrets[0] == secrets[1]:
        assert [one.returncode for one in processes] == [0, 0], said
        return
    assert "rank 0 has waited 3 s for rank 1" in said[0]
    assert "rank 1 has waited 3 s for rank 0" in said[1]


def listens_at(pid: int) -> set[tuple[str, int]]:
    """The IPv4 addresses and TCP ports at which a process listens."""
    inodes = {os.readlink(path)[8:-1] for path in Path(f"/proc/{pid}/fd").iterdir() if "socket:" in os.readlink(path)}
    lines = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    ends = [line[1].split(":") for line in lines if line[3] == "0A" and line[9] in inodes]
    return {(socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)) for address, port in ends}


class Strangers:
    """Connects to every port of some processes again and again, with garbage or silence, and holds what it has."""

    def __init__(self, processes: list[subprocess.Popen[str]]) -> None:
        self.ports: set[tuple[str, int]] = set()
        self.connections = 0
        self._processes = processes
        self._held: deque[socket.socket] = deque()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._disturb)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        while self._held:
            self._held.pop().close()

    def _disturb(self) -> None:
        while not self._over.wait(0.1):
            for process in tuple(self._processes):
                with suppress(OSError):  # it has ended
                    for port in listens_at(process.pid):
                        # A hundred at once, and then ten a second.
                        for _ in range(1 if port in self.ports else 100):
                            self._connect(port)
                        self.ports.add(port)

    def _connect(self, port: tuple[str, int]) -> None:
        with suppress(OSError):  # refused; or the store's answer is short, and then it has closed
            self._held.append(socket.create_connection(port, 1))
            self.connections += 1
            if self.connections % 2:
                self._held[-1].sendall(os.urandom(4096))
        if len(self._held) > 2000:
            self._held.popleft().close()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seconds", [3, pytest.param(60, marks=pytest.mark.slow)])
def test_strangers_at_every_port_do_no_harm_at_the_start_and_later(
    seconds: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    variables = {**os.environ, "WORLD_SIZE": "2", "DDL_TIMEOUT": "100", **address}
    processes: list[subprocess.Popen[str]] = []
    with ExitStack() as ending:

        def start(rank: int) -> None:
            command = [sys.executable, str(PROGRAMS / "strangers.py"), str(seconds)]
            processes.append(
                subprocess.Popen(command, env=variables | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
            )
            ending.enter_context(processes[-1])
            ending.callback(processes[-1].kill)

        strangers = ending.enter_context(Strangers(processes))
        start(0)
        deadline = time.monotonic() + 60
        while len(strangers.ports) < 2:  # the store's, and the one for ranks
            assert time.monotonic() < deadline
            assert processes[0].poll() is None
            time.sleep(0.01)
        time.sleep(seconds)
        start(1)
        outputs = [one.communicate(timeout=seconds + 60)[0] for one in processes]
    assert [one.returncode for one in processes] == [0, 0], outputs
    found = re.findall(r"right sums, joined after ([\d.]+) s, longest sum ([\d.]+) s, ([\d.]+) MB", "".join(outputs))
    assert len(found) == 2, outputs
    with capsys.disabled():
        print(f"\n{len(strangers.ports)} ports, {strangers.connections} connections", *outputs, sep="\n")
    _, joined = (float(one[0]) for one in found)  # the first waits for the second
    assert joined < 1.5
    for _, longest, more in found:
        assert float(longest) < 1
        assert float(more) < 20  # 10 of them without strangers
