"""Crews: the jobs that are timed.

Every contestant is a job of its own that is started once. Between turns its ranks sleep in a read from the controller.
So contestants can take many turns without being started again, and do not disturb each other.
"""

from __future__ import annotations

import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import IO

from ddl.bench.controller import TOKEN, Controller, CrewError, answers

# Starts a job; gets the worker's last arguments, additional variables, and a file for its output.
Start = Callable[[Sequence[str], Mapping[str, str], IO[bytes]], "subprocess.Popen[bytes]"]

ASSEMBLE_SECONDS = 120  # for all ranks to connect
ANSWER_SECONDS = 600  # for the answers of all ranks: at most a turn of the slowest peer
END_SECONDS = 10  # for a job to end after its connections have closed


class WrongSum(CrewError):
    """A contestant computed a wrong sum."""


class Crew:
    """A running job of `ranks` ranks that runs collectives on command."""

    def __init__(
        self,
        name: str,
        ranks: int,
        controller: Controller,
        start: Start,
        log: Path,
        family: str = "",
        *,
        assemble_seconds: float = ASSEMBLE_SECONDS,
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        """Begin the job."""
        self.name, self.family, self.ranks = name, family, ranks
        self._controller = controller
        self._assemble_seconds, self._answer_seconds = assemble_seconds, answer_seconds
        self._token = secrets.token_hex(16)
        self._lines: list[FileIO] = []
        self._log = log
        controller.expect(self._token, ranks)
        with log.open("wb") as output:
            self._process = start([controller.contacts], {TOKEN: self._token}, output)

    def assemble(self) -> None:
        """Wait until all ranks have connected. Raises CrewError."""
        try:
            self._lines = self._controller.lines(
                self._token, self._assemble_seconds, lambda: self._process.poll() is None
            )
        except CrewError as error:
            raise CrewError(f"{self.name}: {error}{self._last_words()}") from None

    def said(self, prefix: str) -> list[str]:
        """The lines of its output, so far, that begin with `prefix`."""
        return [line for line in self._log.read_text(errors="replace").splitlines() if line.startswith(prefix)]

    def check(self, size: int) -> float:
        """Seconds of one collective of `size` bytes with a known result. Raises WrongSum, CrewError."""
        said = self._ask(f"check {size}")
        for rank, answer in enumerate(said):
            if answer.startswith("wrong"):
                raise WrongSum(f"{self.name}: rank {rank}, {size} bytes: {answer}")
        return max(map(self._seconds_of, said))

    def time(self, size: int, repeats: int) -> float:
        """Seconds of one collective of `size` bytes, the mean of `repeats` back to back, on the slowest rank."""
        return max(map(self._seconds_of, self._ask(f"time {size} {repeats}"))) / repeats

    def hang_up(self) -> None:
        """Close the connections to its ranks, which then end."""
        for line in self._lines:
            with suppress(OSError):
                line.close()

    def close(self, seconds: float = END_SECONDS) -> None:
        """End the job: wait for it for `seconds`, then send SIGTERM, then SIGKILL."""
        self.hang_up()
        waits = seconds if self._lines else 0.0
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(waits)
            if self._process.poll() is not None:
                return
            self._process.send_signal(number)
            waits = END_SECONDS
        self._process.wait()

    def _ask(self, text: str) -> list[str]:
        with suppress(OSError):  # the missing answer is the better message
            for line in self._lines:
                line.write(f"{text}\n".encode())
        return answers(self._lines, self._answer_seconds)

    def _seconds_of(self, answer: str) -> float:
        word, _, seconds = answer.partition(" ")
        if word != "took":
            limit = f"{self._answer_seconds:.0f} s"
            raise CrewError(f"{self.name}: a rank ended, or did not answer within {limit}{self._last_words()}")
        return float(seconds)

    def _last_words(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1)  # a job that ends prints its reason last
        lines = self._log.read_text(errors="replace").splitlines()[-12:]
        return "\n  ".join(["", *lines]) if lines else ""


def disband(crews: Sequence[Crew], seconds: float = END_SECONDS) -> None:
    """End all jobs at once."""
    for crew in crews:
        crew.hang_up()
    until = time.monotonic() + seconds
    for crew in crews:
        crew.close(max(0.0, until - time.monotonic()))
