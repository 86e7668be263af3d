"""Jobs that no MPI started: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and messages over TCP."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize("shared_memory", ["1", "0"])
def test_every_collective_is_right_and_has_the_same_bits_on_every_rank(tcp_ranks: Run, shared_memory: str) -> None:
    modes = ["p", "r:4", "r:2x2"] if shared_memory == "1" else [f"r:2x2 -shared_memory {shared_memory}"]
    done = tcp_ranks(4, "sweep.py", "4", "host", *modes, timeout=100)
    assert done.returncode == 0, done.stdout
    for mode in modes:
        assert f"-mode {mode}: right" in done.stdout


@pytest.mark.parametrize("fault", ["kill", "leave"])
def test_a_rank_that_dies_is_named_by_all_others(tcp_ranks: Run, fault: str) -> None:
    done = tcp_ranks(4, "faults.py", fault, timeout=40)
    found = re.findall(r"after ([\d.]+) s: PeerLostError: rank 1 .* died during allreduce #20", done.stdout)
    assert len(found) == 3, done.stdout
    assert max(map(float, found)) < 10


def test_mode_m_says_that_it_needs_mpi(tcp_ranks: Run) -> None:
    done = tcp_ranks(2, "init.py", timeout=40, DDL_OPTIONS="-mode m")
    assert done.stdout.count("this job runs over TCP") == 2, done.stdout


def test_a_rank_that_does_not_come_is_named(command: Run) -> None:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29613"}
    program = PROGRAMS / "init.py"
    done = command([sys.executable, program], timeout=40, RANK="0", WORLD_SIZE="2", DDL_TIMEOUT="2", **address)
    assert "rank 0 has waited 2 s for rank 1" in done.stdout, done.stdout


def listens_at(pid: int) -> set[tuple[str, int]]:
    """The IPv4 addresses and TCP ports at which a process listens."""
    inodes = {os.readlink(path)[8:-1] for path in Path(f"/proc/{pid}/fd").iterdir() if "socket:" in os.readlink(path)}
    lines = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    ends = [line[1].split(":") for line in lines if line[3] == "0A" and line[9] in inodes]
    return {(socket.inet_ntoa(bytes.fromhex(address)[::-1]), int(port, 16)) for address, port in ends}


def test_strangers_at_every_port_of_the_start_do_no_harm() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = os.environ | {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DDL_TIMEOUT": "20",
    }
    command = [sys.executable, str(PROGRAMS / "sweep.py"), "2", "host", "r:2"]

    def start(rank: int) -> subprocess.Popen[str]:
        environment = variables | {"RANK": str(rank)}
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    with start(0) as first, ExitStack() as strangers:
        deadline = time.monotonic() + 30
        while len(listeners := listens_at(first.pid)) < 2:  # the store's, and the one for ranks
            assert time.monotonic() < deadline
            assert first.poll() is None
            time.sleep(0.01)
        for each in listeners:
            for number in range(100):
                stranger = strangers.enter_context(socket.create_connection(each))
                with suppress(ConnectionError):  # the store's answer is short, and then it has closed
                    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * (number % 2))
        began = time.monotonic()
        with start(1) as second:
            outputs = [one.communicate(timeout=60)[0] for one in (first, second)]
    assert first.returncode == second.returncode == 0, outputs
    assert "-mode r:2: right" in outputs[0]
    assert time.monotonic() - began < 30
