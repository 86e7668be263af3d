import fcntl
import os
import resource
import socket
import struct
import subprocess
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path

import pytest

from ddl.launch import guard
from ddl.launch.rankfile import Place
from ddl.launch.reception import STRANGERS
from ddl.launch.reports import Reports
from ddl.launch.watch import Progress, Trouble, Watch

PLACES = (Place(0, "a", 0), Place(1, "a", 0), Place(2, "b", 0), Place(3, "b", 0))


def reports(*ends: tuple[int, int], began: int = 4, asked: str = "") -> Reports:
    made = Reports("T")
    made.take("".join(f"T {rank} began\n" for rank in range(began)).encode())
    made.take("".join(f"T {rank} {status}{asked}\n" * 2 for rank, status in ends).encode())
    return made


def trouble(heard: Reports | None, lost: dict[str, float] | None = None, guards: int = 1) -> Trouble | None:
    progress = Progress(PLACES, heard, lost=lost or {})
    progress.note(100.0, guards)
    return progress.trouble()


def test_while_all_ranks_run_there_is_no_trouble() -> None:
    assert trouble(reports()) is None
    assert trouble(reports((1, 0))) is None
    assert trouble(None) is None


@pytest.mark.parametrize(
    ("heard", "text", "after"),
    [
        (
            reports((2, 3)),
            "rank 2 on b ended with exit status 3, and mpirun did not end the others; see what it wrote above; "
            "--rank-prefix puts the rank before each line",
            2,
        ),
        (reports((0, 0), (1, 0), (2, 0), (3, 0)), "all ranks have ended, and mpirun has not", 3),
        (
            reports(began=2),
            "ranks 2, 3 on b did not begin, and nothing else has for 60 s; try: ddlrun doctor -H b; or give it more: "
            "--start-timeout",
            60,
        ),
    ],
)
def test_mpirun_is_given_time_before_ddlrun_does_its_work(heard: Reports, text: str, after: float) -> None:
    assert trouble(heard) == Trouble(text, 100 + after)


def test_a_start_that_stands_still_is_warned_of_once() -> None:
    progress = Progress(PLACES, reports(began=2))
    progress.note(100.0, 1)
    assert progress.warning(109.9) is None
    assert progress.warning(110.0) == (
        "warning: ranks 2, 3 on b did not begin yet, and nothing else has for 10 s; the job ends after 60 s "
        "(--start-timeout)"
    )
    assert progress.warning(111.0) is None
    progress.note(112.0, 2)  # the other host's guard has answered
    assert progress.warning(130.0) is None


def test_guards_that_do_not_answer_although_their_ranks_have_begun_are_a_warning() -> None:
    heard = reports()
    progress = Progress(PLACES, heard)
    progress.note(100.0, 1)
    assert progress.warning(109.9) is None
    assert progress.warning(110.0) == (
        "warning: the guard on 1 of 2 hosts does not reach ddlrun (a firewall?): the loss of such a host may go "
        "unnoticed"
    )
    assert progress.warning(111.0) is None
    progress.note(112.0, 2)
    assert progress.warning(130.0) is None


def test_a_start_that_goes_on_is_not_given_up() -> None:
    heard = reports(began=1)
    progress = Progress(PLACES, heard)
    progress.note(100.0, 1)
    progress.note(150.0, 1)
    heard.take(b"T 1 began\n")
    progress.note(151.0, 1)
    found = progress.trouble()
    assert found is not None
    assert found.due == 211


def test_a_rank_on_a_host_whose_guard_has_answered_has_not_failed_to_begin() -> None:
    assert trouble(reports(began=2), guards=2) is None


def test_a_start_takes_as_long_as_it_may() -> None:
    progress = Progress(PLACES, reports(began=2), 900)
    progress.note(100.0, 1)
    found = progress.trouble()
    assert found is not None
    assert found.due == 1000
    assert "nothing else has for 900 s" in found.text


def test_a_lost_host_comes_before_everything_else() -> None:
    found = trouble(reports((0, 1)), {"b": 101.0, "a": 102.0})
    assert found is not None
    assert found.due == 102.5


def test_the_status_of_a_job_that_ddlrun_ends_is_the_cause_s() -> None:
    assert Progress(PLACES, reports((2, 137), (1, 3))).status() == 137
    assert Progress(PLACES, reports((0, 0))).status() == 1
    assert Progress(PLACES, None).status() == 1
    # MPI ended the others because a host was lost.
    assert Progress(PLACES, reports((0, 143), asked=" asked"), lost={"b": 9.0}).status() == 1
    assert Progress(PLACES, reports((0, 3)), lost={"b": 9.0}).status() == 3


def test_a_job_whose_ranks_have_all_succeeded_has_succeeded_whatever_becomes_of_mpirun() -> None:
    progress = Progress(PLACES, reports((0, 0), (1, 0), (2, 0), (3, 0)))
    assert progress.status() == 0
    watch = Watch(PLACES, (), progress.reports, lambda _: None)
    assert watch.overdue(10.0) is None
    assert watch.overdue(13.1) == "all ranks have ended, and mpirun has not"
    assert watch.status == 0
    watch.end()


def greet(watch: Watch, rank: int, key: str | None = None) -> socket.socket:
    """A guard's connection."""
    contact = watch.environment[guard.COMMAND].split()[-3].rpartition(":")
    made = socket.create_connection(("127.0.0.1", int(contact[2])))
    key = watch.environment[guard.KEY] if key is None else key
    send(made, f"{key} {rank}\n".encode())
    return made


def send(connection: socket.socket, data: bytes) -> None:
    """Send, and wait until the kernel at the other end has it."""
    connection.sendall(data)
    deadline = time.monotonic() + 10
    while struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0] and time.monotonic() < deadline:
        time.sleep(0.001)


def receive(watch: Watch, now: float) -> None:
    for _ in range(3):
        for one in watch.sockets():
            watch.receive(one, now)


def test_a_guard_that_goes_away_is_a_host_that_is_lost() -> None:
    said: list[str] = []
    watch = Watch(PLACES, (), reports(), said.append)
    one, other = greet(watch, 0), greet(watch, 2)
    receive(watch, 10.0)
    assert watch.overdue(10.0) is None
    other.close()
    receive(watch, 11.0)
    assert (watch.overdue(11.1), watch.lost) == (None, ())  # the ranks' reports may be on their way
    assert (watch.overdue(11.5), watch.lost) == (None, ("b",))
    lost = "host b (ranks 2, 3) is lost: MPI's daemon there, or the guard of the job, was ended; the job ends"
    assert said == [f"{lost}; try: ddlrun doctor -H b"]
    assert watch.overdue(12.0) is None
    assert watch.overdue(12.6) == ""
    assert watch.status == 1
    watch.end()
    assert one.recv(1) == b""
    one.close()
    watch.wait(5)


def test_a_host_that_cannot_be_asked_to_end_its_processes_is_named() -> None:
    said: list[str] = []
    watch = Watch(PLACES, (), reports(), said.append)
    with greet(watch, 2):  # a cable is cut: nothing more comes
        receive(watch, 10.0)
        watch.end()
        watch.wait(0.2)
    assert said == [
        "host b (ranks 2, 3) does not answer: whether its processes have ended is not known; look there for those with "
        f"OMPI_DDLRUN_JOB={watch.environment[guard.MARK]} in their environment"
    ]


def test_when_mpirun_ends_before_its_ranks_its_host_is_not_lost() -> None:
    said: list[str] = []
    watch = Watch(PLACES, (), reports(), said.append, own="a")
    with greet(watch, 0) as one:
        receive(watch, 10.0)
        send(one, guard.ALONE)
        receive(watch, 10.1)
        watch.settle()
        assert (watch.lost, said) == ((), [])
        watch.end()
    watch.wait(5)


@pytest.mark.parametrize("asked", ["", " asked"])
def test_a_host_whose_ranks_mpi_killed_because_another_failed_is_not_lost(asked: str) -> None:
    said: list[str] = []
    heard = reports()
    watch = Watch(PLACES, (), heard, said.append)
    with greet(watch, 0), greet(watch, 2) as other:
        receive(watch, 10.0)
        heard.take(f"T 0 3{asked}\n".encode())
        watch.overdue(10.1)
        other.close()  # MPI has killed the ranks of b, and ends its daemon
        receive(watch, 10.4)
        watch.overdue(10.8)
        watch.settle()
        assert (watch.lost, said) == ((), [])
        watch.end()
    watch.wait(5)


def test_a_host_whose_daemon_ended_before_its_ranks_is_lost_whatever_others_reported_meanwhile() -> None:
    said: list[str] = []
    heard = reports()
    watch = Watch(PLACES, (), heard, said.append)
    with greet(watch, 0), greet(watch, 2) as other:
        receive(watch, 10.0)
        send(other, guard.ALONE)
        receive(watch, 10.1)
        heard.take(b"T 0 1\n")  # because it has lost its peers
        watch.overdue(10.2)
        watch.settle()  # mpirun has ended, and the guard still ends what is left
        assert watch.lost == ("b",)
        other.close()
        receive(watch, 11.3)
        watch.settle()
        assert len(said) == 1
        watch.end()
    watch.wait(5)


def test_what_a_guard_says_is_heard_though_mpirun_ends_at_the_same_moment() -> None:
    watch = Watch(PLACES, (), reports(), lambda _: None, own="a")
    with greet(watch, 2) as other:
        receive(watch, 10.0)
        watch.end()
        send(other, guard.ALONE)
    watch.wait(5)
    watch.settle()
    assert watch.lost == ("b",)


def test_a_host_whose_ranks_have_all_ended_cannot_be_lost() -> None:
    said: list[str] = []
    watch = Watch(PLACES, (), reports((2, 0), (3, 0)), said.append)
    greet(watch, 2).close()
    receive(watch, 10.0)
    watch.settle()
    assert (watch.lost, said) == ((), [])
    watch.end()
    watch.wait(5)


STRANGE = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"x" * 2000,
    b"[" * 2000 + b"\n",
    b'{"key": "a", "rank": 1e999}\n',
    b'{"key": "\\ud800", "rank": 0}\n',
    b"\xff\xfe \n",
    b"\n",
    b"KEY\n",
    b"KEY 99\n",
    b"KEY x\n",
    b"KEY 1e9\n",
    b"KEY -1\n",
]


@pytest.mark.parametrize("line", STRANGE)
def test_strangers_are_shown_out(line: bytes) -> None:
    said: list[str] = []
    watch = Watch(PLACES, (), reports(), said.append)
    port = watch.sockets()[0].getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)) as stranger, greet(watch, 0, "wrong") as wrong:
        send(stranger, line.replace(b"KEY", watch.environment[guard.KEY].encode()))
        receive(watch, 10.0)
        for one in (stranger, wrong):
            one.settimeout(5)
            with suppress(ConnectionResetError):
                assert one.recv(1) == b""
    assert (watch.lost, said) == ((), [])
    watch.end()
    watch.wait(5)


def test_who_connects_and_says_nothing_is_shown_out_after_a_while_and_never_waited_for() -> None:
    watch = Watch(PLACES, (), reports(), lambda _: None)
    port = watch.sockets()[0].getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)) as early, socket.create_connection(("127.0.0.1", port)) as late:
        watch.receive(watch.sockets()[0], 10.0)
        watch.receive(watch.sockets()[0], 14.0)
        early.settimeout(5)
        late.settimeout(0)
        watch.overdue(15.5)
        assert early.recv(1) == b""
        with pytest.raises(BlockingIOError):
            late.recv(1)
        watch.end()
        assert watch.sockets() == []
        late.settimeout(5)
        assert late.recv(1) == b""


def test_a_guard_that_has_just_said_its_key_is_waited_for() -> None:
    watch = Watch(PLACES, (), reports(), lambda _: None)
    one = greet(watch, 0)
    watch.receive(watch.sockets()[0], 10.0)  # accepted, and not read yet
    watch.end()
    assert len(watch.sockets()) == 1
    one.close()
    watch.wait(5)
    assert watch.sockets() == []


def test_all_guards_that_wait_in_the_backlog_are_told_and_waited_for() -> None:
    places = [Place(rank, f"h{rank}", 0) for rank in range(6)]
    watch = Watch(places, (), reports(), lambda _: None)
    port = watch.sockets()[0].getsockname()[1]
    with socket.create_connection(("127.0.0.1", port)):  # a stranger before them
        guards = [greet(watch, rank) for rank in range(6)]
        watch.end()
        assert len(watch.sockets()) == 6
        for one in guards:
            one.settimeout(5)
            assert one.recv(1) == b""
            one.close()
        watch.wait(5)
    assert watch.sockets() == []


def test_of_many_strangers_the_oldest_go_and_guards_still_get_in() -> None:
    watch = Watch(PLACES, (), reports(), lambda _: None)
    listener = watch.sockets()[0]
    many = [socket.create_connection(("127.0.0.1", listener.getsockname()[1])) for _ in range(STRANGERS + 10)]
    one = greet(watch, 0)
    for _ in range(len(many) + 1):
        watch.receive(listener, 10.0)
    assert len(watch.sockets()) == 1 + STRANGERS + 2
    receive(watch, 10.0)
    one.close()
    receive(watch, 11.0)
    watch.settle()
    assert watch.lost == ("a",)
    for stranger in many:
        stranger.close()
    watch.end()


def test_without_a_descriptor_left_the_listener_rests_until_the_next_look() -> None:
    watch = Watch(PLACES, (), reports(), lambda _: None)
    listener = watch.sockets()[0]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.create_connection(("127.0.0.1", listener.getsockname()[1])):
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            watch.receive(listener, 10.0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert watch.sockets() == []
        watch.overdue(10.0)
        assert watch.sockets() == [listener]
    watch.end()


def test_connections_above_the_1024th_descriptor_are_waited_for() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip(f"needs 2048 descriptors, and the limit is {hard}")
    watch = Watch(PLACES, (), reports(), lambda _: None)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    held = []
    try:
        held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
        one = greet(watch, 0)
        receive(watch, 10.0)
        assert max(connection.fileno() for connection in watch.sockets()) > 1023
        watch.end()
        one.close()
        watch.wait(5)
        assert watch.sockets() == []
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_command_that_starts_a_guard_reaches_this_host(tmp_path: Path) -> None:
    watch = Watch(PLACES, (), reports(), lambda _: None)
    mark = watch.environment[guard.MARK]
    left = subprocess.Popen(["sleep", "300"], env={**os.environ, guard.MARK: mark})
    environment = {**os.environ, **watch.environment, "RANK": "2"}
    # In MPI's daemon's place a shell, which the guard ends.
    line = f'sh -c "${guard.COMMAND}"; :'
    started = subprocess.Popen(["sh", "-c", line], env=environment, cwd=tmp_path)
    deadline = time.monotonic() + 20
    while len(watch.sockets()) < 2 and time.monotonic() < deadline:
        receive(watch, 0.0)
        time.sleep(0.02)
    watch.end()
    watch.wait(10)
    assert left.wait(5) == -15
    started.wait(10)
    assert sys.executable in watch.environment[guard.COMMAND]
