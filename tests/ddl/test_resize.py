"""`ddl.resize`: processes join a job that runs, ranks die meanwhile, and every sum is right."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/numpy_average/survivors.py"


class Job:
    """Processes that no launcher started, with what they have printed so far."""

    def __init__(self, size: int, *arguments: str, program: str | Path = "resize.py") -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.command = [sys.executable, "-u", str(ROOT / "tests/ddl/programs" / program), *arguments]
        self.processes: list[subprocess.Popen[str]] = []
        self.output = ""
        self.changed = threading.Condition()
        self.readers: list[threading.Thread] = []
        for rank in range(size):
            self.start(RANK=str(rank), WORLD_SIZE=str(size), DDL_TRANSPORT="tcp")

    def start(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        """One process more."""
        shared = {"PYTHONPATH": str(ROOT / "ddl/src"), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)}
        process = subprocess.Popen(
            [*self.command, *arguments],
            env={**os.environ, **shared, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout
        self.processes.append(process)
        self.readers.append(threading.Thread(target=self.read, args=[process.stdout]))
        self.readers[-1].start()
        return process

    def read(self, stream: IO[str]) -> None:
        for line in stream:
            with self.changed:
                self.output += line
                self.changed.notify_all()

    def await_text(self, pattern: str, timeout: float = 60) -> None:
        """Until this was printed."""
        with self.changed:
            found = self.changed.wait_for(lambda: re.search(pattern, self.output), timeout)
        assert found, f"no {pattern!r} after {timeout} s in\n{self.output}"

    def end(self, timeout: float = 60) -> str:
        """What all have printed, once they have ended."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                self.kill()
                raise AssertionError(f"no end after {timeout} s\n{self.output}") from None
        for reader in self.readers:
            reader.join()
        return self.output

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        for reader in self.readers:
            reader.join()

    def door(self) -> tuple[str, int]:
        """Where processes can join: the loopback address, as the board at MASTER_PORT says."""
        self.await_text(r"0: epoch 0")
        for _ in range(1000):
            with socket.create_connection(("127.0.0.1", self.port), 5) as board:
                words = board.makefile().read().split()
            if words and words[0] == "ddl/door":
                return "127.0.0.1", int(words[words.index("127.0.0.1") + 1])
            time.sleep(0.01)
        raise AssertionError(f"the board says {words}")


def slow(*values: float) -> list[object]:
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    made: list[Job] = []
    yield made
    for job in made:
        job.kill()


def ends(output: str) -> list[str]:
    """Who came to the end, and with whom."""
    return sorted(re.findall(r"(\d+): right to the end, with \[", output), key=int)


def test_one_joins_and_then_two_more_at_once(jobs: list[Job]) -> None:
    jobs.append(Job(2, "until", "0,1,100,101,102", "apart"))
    jobs[0].await_text(r"1: epoch 0")
    jobs[0].start("join", "100")
    jobs[0].await_text(r"100: epoch 1 with \[0, 1, 100\]")
    for name in ("101", "102"):
        jobs[0].start("join", name)
    output = jobs[0].end()
    assert ends(output) == ["0", "1", "100", "101", "102"], output


def test_a_job_of_one_rank_grows(jobs: list[Job]) -> None:
    jobs.append(Job(1, "until", "0,100,101"))
    for name in ("100", "101"):
        jobs[0].start("join", name)
    output = jobs[0].end()
    assert "with [0, 100, 101]" in output or "with [0, 101, 100]" in output, output
    assert ends(output) == ["0", "100", "101"], output


@pytest.mark.parametrize("late", [0.3, *slow(0.05, 0.15, 0.2, 0.22, 0.24, 0.26, 0.28, 0.35, 0.4)])
def test_one_that_joins_may_die_at_any_moment_and_another_takes_its_place(jobs: list[Job], late: float) -> None:
    jobs.append(Job(3, "until", "0,1,2,101", f"{late}+100", "apart"))
    jobs[0].await_text(r"2: epoch 0")
    jobs[0].start("join", "100").wait(30)
    jobs[0].start("join", "101")
    output = jobs[0].end()
    assert ends(output) == ["0", "1", "2", "101"], output


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("late", [0.0, *slow(0.002, 0.005, 0.01, 0.02)])
def test_a_rank_may_die_while_others_join(jobs: list[Job], victim: int, late: float) -> None:
    left = [rank for rank in range(3) if rank != victim]
    job = Job(3, "until", ",".join(map(str, (*left, 100, 101))), f"{late}+{victim}")
    jobs.append(job)
    job.await_text(r"2: epoch 0")
    for name in ("100", "101"):
        job.start("join", name)
    output = job.end()
    assert ends(output) == [*map(str, left), "100", "101"], output


def test_a_rank_joins_after_one_has_died_and_each_is_watched_under_its_number(
    jobs: list[Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DDL_TENSORBOARD", str(tmp_path))
    jobs.append(Job(3, "until", "1,2,100", "5:0"))
    jobs[0].await_text(r"1: epoch 1 with \[1, 2\]")
    jobs[0].start("join", "100")
    output = jobs[0].end()
    assert ends(output) == ["1", "2", "100"], output
    its = [tmp_path.glob(f"rank*/*.{one.pid}.bascule") for one in jobs[0].processes[1:]]
    folders = [sorted(one.parent.name for one in found) for found in its]
    # A rank whose number changes before its first sample has no folder of the former one.
    former = ["rank1"], ["rank2"], []
    assert [sorted({*found} - {*old}) for found, old in zip(folders, former, strict=True)] == [
        ["rank0"],
        ["rank1"],
        ["rank2"],
    ]


def test_strangers_at_the_door_change_nothing(jobs: list[Job]) -> None:
    jobs.append(Job(2, "until", "0,1,100"))
    door = jobs[0].door()
    strangers = [socket.create_connection(door, 5) for _ in range(100)]
    for number, stranger in enumerate(strangers):
        if number % 2:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
    jobs[0].start("join", "100")
    output = jobs[0].end()
    assert ends(output) == ["0", "1", "100"], output
    for stranger in strangers:
        stranger.close()


def test_who_has_other_options_is_told_so_and_the_job_goes_on(jobs: list[Job]) -> None:
    jobs.append(Job(2, "until", "0,1,100"))
    jobs[0].start("join", "100", DDL_OPTIONS="-shared_memory 0")
    jobs[0].await_text(
        "MismatchError: ddl_join: the job does not take this process: its options are '-shared_memory 0'"
    )
    jobs[0].start("join", "100")
    output = jobs[0].end()
    assert ends(output) == ["0", "1", "100"], output


def test_who_waits_in_vain_ends_with_an_error_that_says_for_what(jobs: list[Job]) -> None:
    jobs.append(Job(0, "until", "0"))
    jobs[0].start("join", "100", DDL_TIMEOUT="1")
    output = jobs[0].end()
    assert "RankTimeoutError: ddl_join: this process has waited 1 s for the job to take it in: nobody" in output


def test_the_example_trains_what_one_rank_trains_though_ranks_die_and_one_joins(jobs: list[Job]) -> None:
    jobs.append(Job(4, "--die", "50:0", "--die", "120:2", "--ranks", "3", program=EXAMPLE))
    jobs[0].start("--join")
    output = jobs[0].end()
    (apart,) = re.findall(r"3 ranks are left: .*\non one rank the same, at most (\S+) apart", output)
    assert float(apart) < 1e-12, output
