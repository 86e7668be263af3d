"""The guard as a program of its own, with a socket of the test in ddlrun's place."""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from ddl.launch import guard

GUARD = Path(guard.__file__)


def start(port: int, mark: str, daemon: int = 0, rank: int = 0, stdout: int | None = None) -> subprocess.Popen[bytes]:
    environment = {**os.environ, guard.KEY: "secret", guard.MARK: mark, "RANK": "3"}
    contacts = f"127.0.0.1:1,127.0.0.1:{port}"
    command = [sys.executable, "-I", "-S", str(GUARD), contacts, str(daemon), str(rank)]
    return subprocess.Popen(command, env=environment, stdout=stdout)


def watches(process: subprocess.Popen[bytes]) -> bool:
    """Wait until a guard holds its daemon: what comes next is that it waits for its end."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with suppress(OSError):
            if any("[pidfd]" in os.readlink(one) for one in Path(f"/proc/{process.pid}/fd").iterdir()):
                return True
        time.sleep(0.005)
    return False


def sleeper(mark: str, script: str = "exec sleep 300") -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sh", "-c", script], env={**os.environ, guard.MARK: mark}, start_new_session=True)


def last_word(pid: int) -> str:
    """Its command line; "" if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[-2]
    except (OSError, IndexError):
        return ""


def gone(process: subprocess.Popen[bytes], seconds: float = 10) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False
    return True


@pytest.fixture
def mark() -> str:
    return f"test-{os.getpid()}-{os.urandom(4).hex()}"


def test_the_end_of_the_connection_ends_the_job_s_processes_and_no_others(mark: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        stubborn = sleeper(mark, "trap '' TERM; env -i sleep 300 & echo; while :; do sleep 1; done")
        ours, other, daemon = sleeper(mark), sleeper(f"{mark}x"), subprocess.Popen(["sleep", "300"])
        one = start(server.getsockname()[1], mark, daemon.pid)
        server.settimeout(20)
        connection, _ = server.accept()
        with connection, connection.makefile() as lines:
            assert lines.readline() == "secret 3\n"
            assert not select.select([connection], [], [], 0.2)[0]
            assert ours.poll() is None
            connection.shutdown(socket.SHUT_WR)
            # It closes its end when all have ended.
            assert lines.readline() == ""
            assert set(guard.marked(mark)) <= {one.pid}
    assert all(map(gone, (one, ours, stubborn, daemon)))
    assert other.poll() is None
    other.kill()
    other.wait()


def test_processes_are_found_whatever_became_of_their_parents_and_their_environment(mark: str) -> None:
    first = sleeper(mark, "(setsid sleep 300 &); env -i sleep 301 & setsid sleep 302 & wait")
    deadline = time.monotonic() + 10
    names: list[str] = []
    while names != ["300", "301", "302"] and time.monotonic() < deadline:
        found = guard.marked(mark)
        names = sorted(last_word(pid) for pid in found if pid != first.pid)
    assert names == ["300", "301", "302"]
    guard.end_marked(mark)
    assert not any(guard._began(pid) == began for pid, began in found.items())
    assert gone(first)


@pytest.mark.parametrize("reachable", [True, False])
def test_the_end_of_mpi_s_daemon_ends_the_job_s_processes_too(mark: str, reachable: bool) -> None:
    ours, daemon = sleeper(mark), subprocess.Popen(["sleep", "300"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = start(server.getsockname()[1] if reachable else 1, mark, daemon.pid)
        assert watches(one)
        assert ours.poll() is None
        daemon.kill()
        daemon.wait()
        assert all(map(gone, (one, ours)))


@pytest.mark.parametrize("in_order", [True, False])
def test_mpirun_ends_by_itself_where_its_daemon_has_ended_in_order(mark: str, in_order: bool) -> None:
    # As hydra's: it goes on after its daemon, for other hosts' ranks, and would die of being asked to end meanwhile.
    # SIGTERM may reach its sleep before itself, so its own end has the same status as being asked.
    on, status = (2.5, 0) if in_order else (300, 7)
    script = f"trap 'kill $!; exit 7' TERM; sleep 300 & echo $!; wait $!; sleep {on} & wait $!; exit {status}"
    mpirun = sleeper(mark, script)
    rank = subprocess.Popen(["sleep", "300"])
    deadline = time.monotonic() + 10
    while not (children := Path(f"/proc/{mpirun.pid}/task/{mpirun.pid}/children").read_text().split()):
        assert time.monotonic() < deadline
    daemon = int(children[0])
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = start(server.getsockname()[1], mark, daemon, rank.pid)
        assert watches(one)
        server.settimeout(20)
        connection, _ = server.accept()
        if in_order:
            rank.kill()
            rank.wait()
        os.kill(daemon, signal.SIGKILL)
        with connection:
            assert all(map(gone, (one, mpirun)))
    # Ended by SIGTERM, or by SIGKILL if a busy machine makes it answer too late.
    assert mpirun.returncode in ((status,) if in_order else (status, -signal.SIGKILL))
    rank.kill()
    rank.wait()


@pytest.mark.parametrize("in_order", [True, False])
def test_a_daemon_that_ends_before_the_rank_that_it_started_is_told_to_ddlrun(mark: str, in_order: bool) -> None:
    ours, daemon = sleeper(mark), subprocess.Popen(["sleep", "300"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = start(server.getsockname()[1], mark, daemon.pid, ours.pid)
        server.settimeout(20)
        connection, _ = server.accept()
        with connection, connection.makefile("rb") as lines:
            assert lines.readline() == b"secret 3\n"
            assert watches(one)
            if in_order:
                ours.kill()
                ours.wait()
            daemon.kill()
            daemon.wait()
            assert lines.readline() == (b"" if in_order else guard.ALONE)
        assert all(map(gone, (one, ours)))


@pytest.mark.parametrize("answers", [True, False])
def test_the_rank_begins_once_the_guard_is_connected_or_soon(mark: str, answers: bool) -> None:
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as server,
        socket.socket() as first,
        subprocess.Popen(["sleep", "300"]) as daemon,
    ):
        if not answers:
            first.connect(server.getsockname())  # the kernel drops the next connection
        begin = time.monotonic()
        one = start(server.getsockname()[1], mark, daemon.pid, stdout=subprocess.PIPE)
        assert one.stdout is not None
        with one.stdout as output:
            assert output.read() == b""
        waited = time.monotonic() - begin
        assert one.poll() is None
        # Connected: ddlrun's side has the line. Not connected: the rank has waited long enough.
        assert select.select([server], [], [], 0)[0] if answers else waited > 1.9
        daemon.kill()
    assert gone(one)


def test_with_nothing_to_watch_there_is_no_job_any_more(mark: str) -> None:
    ours, daemon = sleeper(mark), subprocess.Popen(["true"])
    daemon.wait()
    assert all(map(gone, (start(1, mark, daemon.pid), ours)))
