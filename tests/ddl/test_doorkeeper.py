"""The port filter, loaded into a program that it takes for MPI's: whose bytes the program reads."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from ddl.launch import door

PROGRAM = Path(__file__).with_name("programs") / "mpirun.c"
NOBODY = 65534
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close() sends a reset

# Another user's process: connects from the port in argv[3] (0: any), sends, and ends as argv[2] says.
CLIENT = f"""
import os, socket, sys
"".encode("idna")  # which another user could not read from this Python's folder
os.setuid({NOBODY})
port, end, own = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
with socket.socket() as one:
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    one.bind(("127.0.0.1", own))
    one.connect(("127.0.0.1", port))
    one.send(b"data")
    if end == "reset":
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, {RESET!r})
    if end == "open":
        print("sent", flush=True)
        sys.stdin.read()
"""

# What runs in a network namespace with several addresses: the port filter lets connections to some of them in.
SEVERAL = """
import os, socket, subprocess, sys
for command in ("address add 10.1.0.1/24 dev lo", "address add 10.1.0.2/24 dev lo", "address add 10.2.0.1/24 dev lo",
                "link set lo up"):
    subprocess.run(["ip", *command.split()], check=True)
with subprocess.Popen(sys.argv[1], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
    port = int(program.stdout.readline())
    for address in ("10.1.0.1", "10.1.0.2", "10.2.0.1"):
        with socket.create_connection((address, port)) as one:
            one.send(b"data")
            print("4", file=program.stdin, flush=True)
            program.stdout.readline()
            print(address, program.stdout.readline().strip())
    program.stdin.close()
"""


class Mpirun:
    """The program, with the port filter."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.port = int(self._line())

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def accept(self, count: int = 4) -> None:
        assert self._process.stdin is not None
        print(count, file=self._process.stdin, flush=True)
        assert self._line() == "accepted\n"

    def received(self) -> str:
        return self._line().strip()

    def read(self) -> str:
        """What recv() returned on the next connection, and the bytes."""
        self.accept()
        return self.received()

    def end(self) -> str:
        _, errors = self._process.communicate(timeout=20)
        return errors


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("gcc")
    assert compiler
    made = tmp_path_factory.mktemp("door") / "mpirun"
    subprocess.run([compiler, "-o", made, PROGRAM], check=True)
    return made


@pytest.fixture
def environment() -> dict[str, str]:
    keeper = door.find()
    assert keeper is not None
    return {**os.environ, **door.variables(keeper, door.LOOPBACK, {})}


Start = Callable[..., Mpirun]


@pytest.fixture
def start(program: Path, environment: dict[str, str]) -> Iterator[Start]:
    with ExitStack() as processes:

        def started(before: Sequence[str] = ()) -> Mpirun:
            # `env`, because the programs before it are not to have the port filter.
            loaded = [f"{name}={environment[name]}" for name in (door.PRELOAD, door.NETWORKS)]
            command = [*before, "env", *loaded, str(program)]
            pipe = subprocess.PIPE
            process = processes.enter_context(
                subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
            )
            processes.callback(process.kill)
            return Mpirun(process)

        yield started


@pytest.fixture
def connect() -> Iterator[Callable[..., None]]:
    """Another user connects, sends four bytes, and then closes the connection, resets it, or leaves it open."""
    with ExitStack() as processes:

        def connected(port: int, end: str, own: int = 0) -> None:
            command = [sys.executable, "-c", CLIENT, str(port), end, str(own)]
            client = processes.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            processes.callback(client.kill)
            assert client.stdout is not None
            if end == "open":
                assert client.stdout.readline() == "sent\n"
            else:
                assert client.wait(20) == 0

        yield connected


def test_a_process_of_the_same_user_is_read(start: Start) -> None:
    mpirun = start()
    with socket.create_connection(("127.0.0.1", mpirun.port)) as one:
        one.send(b"data")
        assert mpirun.read() == "4 data"


def test_bytes_before_an_error_are_not_lost(start: Start) -> None:
    mpirun = start()
    with socket.create_connection(("127.0.0.1", mpirun.port)) as one:
        mpirun.accept(8)
        one.send(b"data")
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    assert mpirun.received() == "4 data"


def test_a_connection_that_sends_a_byte_now_and_then_is_closed_in_time(start: Start) -> None:
    mpirun = start()
    begin = time.monotonic()
    with socket.create_connection(("127.0.0.1", mpirun.port)) as one, ThreadPoolExecutor() as thread:
        mpirun.accept(-90)
        received = thread.submit(mpirun.received)
        while not wait([received], 0.5).done:
            with suppress(OSError):
                one.send(b"x")
    assert 4 < time.monotonic() - begin < 30
    count, data = received.result().split()
    assert data == "x" * int(count)
    assert 2 < int(count) < 20


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")


@pytest.mark.root
@needs_root
@pytest.mark.parametrize("end", ["open", "close", "reset"])
def test_nothing_of_what_another_user_sends_is_read(start: Start, connect: Callable[..., None], end: str) -> None:
    mpirun = start()
    connect(mpirun.port, end)
    assert mpirun.read() == "0"


@pytest.mark.root
@needs_root
def test_the_same_ports_at_other_addresses_are_no_proof(start: Start, connect: Callable[..., None]) -> None:
    mpirun = start()
    with ExitStack() as sockets:
        with socket.create_server(("127.0.0.1", 0)) as free:
            own = free.getsockname()[1]
        for host in range(2, 42):  # connections of root's, with the same two ports
            listener = sockets.enter_context(socket.create_server((f"127.0.0.{host}", mpirun.port)))
            one = sockets.enter_context(socket.socket())
            one.bind((f"127.0.0.{host}", own))
            one.connect(listener.getsockname())
        connect(mpirun.port, "open", own)
        assert mpirun.read() == "0"


@pytest.mark.root
@needs_root
def test_if_the_kernel_shows_no_connections_others_are_let_in_and_a_warning_says_so(
    start: Start, connect: Callable[..., None]
) -> None:
    mpirun = start(["unshare", "-m", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh"])
    for _ in range(2):
        connect(mpirun.port, "open")
        assert mpirun.read() == "4 data"
    assert mpirun.end().count("neither /proc/net/tcp nor /proc/net/tcp6 can be read") == 1


@pytest.mark.root
@needs_root
def test_every_address_of_this_host_in_the_networks_can_be_connected_to(
    program: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "mpirun.sh"
    loaded = f"{door.PRELOAD}={environment[door.PRELOAD]} {door.NETWORKS}=10.1.0.0/24"
    script.write_text(f"#!/bin/sh\n{loaded} exec {program}\n")
    script.chmod(0o755)
    done = subprocess.run(
        ["unshare", "-n", sys.executable, "-c", SEVERAL, script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines() == ["10.1.0.1 4 data", "10.1.0.2 4 data", "10.2.0.1 0"]
