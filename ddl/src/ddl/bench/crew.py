"""The ranks of the jobs that are timed, and the line to each of them.

Every contestant is a job of its own, started once; between their turns its ranks sleep in a read from the controller.
So contestants can take turns many times without being started again, and do not disturb each other.
"""

from __future__ import annotations

import secrets
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

Start = Callable[[Sequence[str], IO[bytes]], "subprocess.Popen[bytes]"]

ANSWER_SECONDS = 600  # for one line: the slowest peer's largest message
GREETING_SECONDS = 5  # for a rank's first line
LINE_BYTES = 512  # most of a line


class CrewError(RuntimeError):
    """A contestant did not come up, ended, or computed a wrong sum; the message has the last lines of its output."""


class Controller:
    """Listens for ranks and gives each connection to the crew whose token it says."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("", 0))
        self._lock = threading.Condition()
        self._found: dict[str, dict[int, _Line]] = {}
        threading.Thread(target=self._accept, daemon=True).start()

    def expect(self, token: str) -> None:
        """From now on ranks that say `token` are welcome."""
        with self._lock:
            self._found[token] = {}

    @property
    def port(self) -> int:
        """Where the ranks connect to, on every address of this host."""
        return int(self._listener.getsockname()[1])

    def address_towards(self, address: str) -> str:
        """This host's own address, as a host at `address` sees it."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, self.port))  # sends nothing
            return str(probe.getsockname()[0])

    def lines(self, token: str, count: int, seconds: float, alive: Callable[[], bool]) -> list[_Line]:
        """The lines to all `count` ranks that say `token`, by rank, as soon as they are there.

        Raises CrewError after `seconds`, or when the job is not `alive` any more.
        """
        deadline = time.monotonic() + seconds
        with self._lock:
            while len(self._found.get(token, {})) < count:
                if not alive():
                    raise CrewError("its job ended before all ranks were there")
                if time.monotonic() > deadline:
                    there = sorted(self._found.get(token, {}))
                    raise CrewError(f"after {seconds:.0f} s only ranks {there} of {count} were there")
                self._lock.wait(0.1)
            return [line for _, line in sorted(self._found.pop(token).items())]

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            # In a thread of its own: a stranger that says nothing keeps nobody waiting.
            threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(GREETING_SECONDS)
        line = _Line(connection)
        words = line.read().split()
        known = len(words) == 4 and words[0] == "rank" and words[1] in self._found and words[2].isdecimal()
        if not known:  # somebody else
            line.close()
            return
        connection.settimeout(ANSWER_SECONDS)
        with self._lock:
            self._found[words[1]][int(words[2])] = line
            self._lock.notify_all()


class _Line:
    """A connection that carries a line at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._reader = connection.makefile("r", encoding="utf-8", errors="replace")

    def write(self, text: str) -> None:
        self._connection.sendall(f"{text}\n".encode())

    def read(self) -> str:
        """The next line; "" at the end, or after ANSWER_SECONDS."""
        try:
            return self._reader.readline(LINE_BYTES).strip()
        except OSError:
            return ""

    def close(self) -> None:
        self._reader.close()
        self._connection.close()


class Crew:
    """A running job of `ranks` ranks that does collectives when it is told to."""

    def __init__(
        self, name: str, ranks: int, controller: Controller, address: str, start: Start, log: Path, seconds: float = 120
    ) -> None:
        """Begin the job: `start` gets the worker's three last arguments and the file for its output."""
        self.name, self.ranks = name, ranks
        self._controller, self._seconds = controller, seconds
        self._token = secrets.token_hex(8)
        self._lines: list[_Line] = []
        self._log = log
        controller.expect(self._token)
        with log.open("wb") as output:
            self._process = start([address, str(controller.port), self._token], output)

    def assemble(self) -> None:
        """Wait until all ranks are there. Raises CrewError."""
        try:
            self._lines = self._controller.lines(
                self._token, self.ranks, self._seconds, lambda: self._process.poll() is None
            )
        except CrewError as error:
            raise CrewError(f"{self.name}: {error}{self._last_words()}") from None

    def check(self, size: int) -> float:
        """Seconds of one collective of `size` bytes with a known result. Raises CrewError where it is wrong."""
        answers = self._ask(f"check {size}")
        for rank, answer in enumerate(answers):
            if answer.startswith("wrong"):
                raise CrewError(f"{self.name}: rank {rank}, {size} bytes: {answer}")
        return max(map(self._seconds_of, answers))

    def time(self, size: int, repeats: int) -> float:
        """Seconds of one collective of `size` bytes, of `repeats` back to back, on the slowest rank."""
        return max(map(self._seconds_of, self._ask(f"time {size} {repeats}"))) / repeats

    def close(self) -> None:
        """End the job: its ranks end with their lines, and it is killed when that takes too long."""
        for line in self._lines:
            line.close()
        try:
            self._process.wait(timeout=10 if self._lines else 0)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10)
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()

    def _ask(self, text: str) -> list[str]:
        with suppress(OSError):  # the missing answer says it better
            for line in self._lines:
                line.write(text)
        answers = []
        for line in self._lines:
            answers.append(line.read())
            if not answers[-1]:
                break  # it ended, or hangs: the others would be waited for as long again
        return answers

    def _seconds_of(self, answer: str) -> float:
        word, _, seconds = answer.partition(" ")
        if word != "took":
            raise CrewError(f"{self.name}: a rank ended or did not answer{self._last_words()}")
        return float(seconds)

    def _last_words(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=1)  # what ends says why last
        lines = self._log.read_text(errors="replace").splitlines()[-12:]
        return "\n  ".join(["", *lines]) if lines else ""
