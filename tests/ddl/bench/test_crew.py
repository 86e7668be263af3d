"""Crews of small programs in place of workers: what a rank says, and what becomes of one that ends or lies."""

import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

import pytest

from ddl.bench.crew import Controller, Crew, CrewError

RANK = """
import socket, sys
rank, size, mode, address, port, token = sys.argv[1:]
with socket.create_connection((address, int(port))) as line, line.makefile("rw") as controller:
    print("rank", token, rank, size, file=controller, flush=True)
    for said in controller:
        if mode == "dies" and said.startswith("time"):
            sys.exit("worker: something broke")
        answer = "wrong: element 3 is 1, expected 2" if mode == "lies" and rank == "1" else f"took {1 + int(rank)}.5"
        print(answer, file=controller, flush=True)
"""
TWO = f"for rank in 0 1; do {sys.executable} -c '{RANK.replace(chr(39), chr(34))}' $rank 2 $0 $1 $2 $3 & done; wait"


@pytest.fixture
def controller() -> Iterator[Controller]:
    made = Controller()
    yield made
    made.close()


def starter(mode: str, script: str = TWO) -> Callable[[Sequence[str], IO[bytes]], "subprocess.Popen[bytes]"]:
    def start(last: Sequence[str], output: IO[bytes]) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(["sh", "-c", script, mode, *last], stdout=output, stderr=subprocess.STDOUT)

    return start


def assembled(controller: Controller, tmp_path: Path, mode: str) -> Crew:
    crew = Crew("them", 2, controller, "127.0.0.1", starter(mode), tmp_path / "log")
    crew.assemble()
    return crew


def test_the_slowest_rank_counts(controller: Controller, tmp_path: Path) -> None:
    crew = assembled(controller, tmp_path, "works")
    assert crew.check(1024) == 2.5
    assert crew.time(1024, repeats=10) == 0.25
    crew.close()


def test_a_wrong_sum_is_named_with_its_rank(controller: Controller, tmp_path: Path) -> None:
    crew = assembled(controller, tmp_path, "lies")
    with pytest.raises(CrewError, match=r"them: rank 1, 1024 bytes: wrong: element 3 is 1, expected 2"):
        crew.check(1024)
    crew.close()


def test_a_rank_that_ends_is_an_error_with_its_last_words(controller: Controller, tmp_path: Path) -> None:
    crew = assembled(controller, tmp_path, "dies")
    with pytest.raises(CrewError, match=r"(?s)a rank ended or did not answer.*something broke"):
        crew.time(1024, repeats=1)
    crew.close()


def test_a_job_that_never_comes_up_says_why(controller: Controller, tmp_path: Path) -> None:
    crew = Crew("them", 2, controller, "127.0.0.1", starter("", "echo no such MPI; exit 3"), tmp_path / "log")
    with pytest.raises(CrewError, match=r"(?s)them: its job ended before all ranks were there.*no such MPI"):
        crew.assemble()
    crew.close()


@pytest.mark.parametrize("said", [b"rank x y z\n", b"\xff\xfe\n", b"rank FOO 0 1\n", b""])
def test_strangers_disturb_nobody(controller: Controller, tmp_path: Path, said: bytes) -> None:
    with socket.create_connection(("127.0.0.1", controller.port)) as stranger:
        stranger.sendall(said)
        crew = assembled(controller, tmp_path, "works")
        assert crew.check(1024) == 2.5
        crew.close()


def test_ranks_that_are_missing_are_counted(controller: Controller, tmp_path: Path) -> None:
    one = TWO.replace("0 1", "0")
    crew = Crew("them", 2, controller, "127.0.0.1", starter("works", one), tmp_path / "log", seconds=1)
    with pytest.raises(CrewError, match=r"after 1 s only ranks \[0\] of 2 were there"):
        crew.assemble()
    crew.close()
