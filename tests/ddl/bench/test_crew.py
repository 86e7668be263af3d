"""Crews of small programs in place of workers: what a rank says, and what becomes of one that ends, hangs or lies."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO

import pytest

from ddl.bench.controller import TOKEN, Controller, CrewError
from ddl.bench.crew import Crew, WrongSum, disband
from ddl.launch import reception

RANK = """
import os, socket, sys, time
rank, size, mode, contacts = sys.argv[1:]
host, port = contacts.split(",")[-1].split(":")
with socket.create_connection((host, int(port))) as line, line.makefile("rw") as controller:
    print(os.environ["OMPI_DDLRUN_BENCH"], rank, size, file=controller, flush=True)
    for said in controller:
        if mode == "dies" and said.startswith("time") and rank == "1":
            sys.exit("worker: something broke")
        if mode in ("dies", "hangs") and rank == "0":
            time.sleep(300)
        answer = "wrong: element 3 is 1, expected 2" if mode == "lies" and rank == "1" else f"took {1 + int(rank)}.5"
        print(answer, file=controller, flush=True)
"""
TWO = f"for rank in 0 1; do {sys.executable} -c '{RANK.replace(chr(39), chr(34))}' $rank 2 $0 $1 & done; wait"


STARTED: list["subprocess.Popen[bytes]"] = []


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """End the ranks that hang, which no longer have the parent that a crew could end."""
    yield
    while STARTED:
        with suppress(ProcessLookupError):
            os.killpg(STARTED[-1].pid, signal.SIGKILL)
        STARTED.pop().wait()


@pytest.fixture
def controller() -> Iterator[Controller]:
    made = Controller()
    yield made
    made.close()


def starter(
    mode: str, script: str = TWO
) -> Callable[[Sequence[str], Mapping[str, str], IO[bytes]], "subprocess.Popen[bytes]"]:
    def start(last: Sequence[str], added: Mapping[str, str], output: IO[bytes]) -> "subprocess.Popen[bytes]":
        words = ["sh", "-c", script, mode, *last]
        STARTED.append(
            subprocess.Popen(words, env=dict(added), stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        )
        return STARTED[-1]

    return start


def crew_of(controller: Controller, tmp_path: Path, mode: str, script: str = TWO, answer_seconds: float = 60) -> Crew:
    return Crew(
        "them", 2, controller, starter(mode, script), tmp_path / "log",
        assemble_seconds=10, answer_seconds=answer_seconds,
    )  # fmt: skip


def assembled(controller: Controller, tmp_path: Path, mode: str, answer_seconds: float = 60) -> Crew:
    crew = crew_of(controller, tmp_path, mode, answer_seconds=answer_seconds)
    crew.assemble()
    return crew


def test_the_slowest_rank_counts(controller: Controller, tmp_path: Path) -> None:
    crew = assembled(controller, tmp_path, "works")
    assert crew.check(1024) == 2.5
    assert crew.time(1024, repeats=10) == 0.25
    crew.close()


def test_a_wrong_sum_is_named_with_its_rank(controller: Controller, tmp_path: Path) -> None:
    crew = assembled(controller, tmp_path, "lies")
    with pytest.raises(WrongSum, match=r"them: rank 1, 1024 bytes: wrong: element 3 is 1, expected 2"):
        crew.check(1024)
    crew.close()


def test_a_rank_that_ends_is_an_error_with_its_last_words_and_nobody_is_waited_for(
    controller: Controller, tmp_path: Path
) -> None:
    crew = assembled(controller, tmp_path, "dies", answer_seconds=600)
    with pytest.raises(CrewError, match=r"(?s)a rank ended, or did not answer within 600 s.*something broke"):
        crew.time(1024, repeats=1)  # rank 0 sleeps
    crew.close(0)


def test_ranks_that_hang_are_waited_for_once(controller: Controller, tmp_path: Path) -> None:
    crew = assembled(controller, tmp_path, "hangs", answer_seconds=0.5)
    before = time.monotonic()
    with pytest.raises(CrewError, match=r"a rank ended, or did not answer within 0 s"):
        crew.check(1024)
    assert time.monotonic() - before < 5
    disband([crew], 0.1)
    assert crew._process.poll() is not None


def test_a_job_that_never_comes_up_says_why(controller: Controller, tmp_path: Path) -> None:
    crew = crew_of(controller, tmp_path, "", "echo no such MPI; exit 3")
    with pytest.raises(CrewError, match=r"(?s)them: its job ended before all ranks were there.*no such MPI"):
        crew.assemble()
    crew.close()


def test_a_worker_of_another_mpi_than_its_mpirun_is_found_out(controller: Controller, tmp_path: Path) -> None:
    crew = crew_of(controller, tmp_path, "works", TWO.replace("$rank 2", "0 1"))
    with pytest.raises(CrewError, match=r"its ranks say that they are 1, and 2 were started: .* not of one MPI"):
        crew.assemble()
    crew.close(0)


def test_ranks_take_the_address_that_leads_to_the_controller(
    tmp_path: Path, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    contacts = f"192.0.2.1:9,{controller.contacts}"
    monkeypatch.setattr(Controller, "contacts", contacts)
    crew = assembled(controller, tmp_path, "works")
    assert crew.check(1024) == 2.5
    crew.close()


STRANGE = [b"rank x y z\n", b"\xff\xfe\n", b"FOO 0 1\n", b"a 0 1\n", b"", b"x" * 5000, b"[" * 2000 + b"\n", b"\n"]


@pytest.mark.parametrize("said", STRANGE)
def test_strangers_disturb_nobody(controller: Controller, tmp_path: Path, said: bytes) -> None:
    contact = controller.contacts.split(":")
    with ExitStack() as strangers:
        for _ in range(reception.STRANGERS + 8):
            stranger = strangers.enter_context(socket.create_connection((contact[0], int(contact[1]))))
            stranger.sendall(said)
        crew = assembled(controller, tmp_path, "works")
        assert crew.check(1024) == 2.5
        crew.close()


def test_the_token_is_on_no_command_line(controller: Controller, tmp_path: Path) -> None:
    given: list[str] = []

    def start(last: Sequence[str], added: Mapping[str, str], output: IO[bytes]) -> "subprocess.Popen[bytes]":
        given.extend((*last, added[TOKEN]))
        return starter("works")(last, added, output)

    crew = Crew("them", 2, controller, start, tmp_path / "log")
    crew.assemble()
    contacts, token = given
    assert token not in contacts
    assert contacts == controller.contacts
    crew.close()


def test_ranks_that_are_missing_are_counted(controller: Controller, tmp_path: Path) -> None:
    crew = Crew("them", 2, controller, starter("works", TWO.replace("0 1", "0")), tmp_path / "log", assemble_seconds=1)
    with pytest.raises(CrewError, match=r"after 1 s only ranks \[0\] of 2 were there"):
        crew.assemble()
    crew.close()
