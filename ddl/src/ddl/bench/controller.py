"""The controller: it accepts connections from the ranks of the timed jobs, and gives them orders.

A rank's first line is `TOKEN RANK SIZE`. The token is its job's. It is passed in the environment, because every user of
a host can read command lines.
"""

from __future__ import annotations

import hmac
import re
import select
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import FileIO

from ddl.launch.reception import Reception

TOKEN = "OMPI_DDLRUN_BENCH"  # Open MPI hands variables that begin with OMPI_ to every rank unasked, hydra all of them
LINE_BYTES = 512  # at most, of an answer

_HELLO = re.compile(rb"([0-9a-f]{1,32}) (\d{1,9}) (\d{1,9})")


class CrewError(RuntimeError):
    """A contestant did not come up, or ended. The message has the last lines of its output."""


class Controller:
    """Listens for ranks, and assigns each connection to the job whose token it sends."""

    def __init__(self, addresses: Sequence[str] = (), ranks: int = 0) -> None:
        """`addresses` of this host at which `ranks` ranks may reach it, best first; empty: all are on this host."""
        self._reception = Reception(addresses, ranks)
        self._expected: dict[str, int] = {}  # tokens, and the number of ranks that send each
        self._found: dict[str, dict[int, FileIO]] = {}
        self._odd: dict[str, int] = {}  # tokens of jobs with a wrong number of ranks, and that number

    @property
    def contacts(self) -> str:
        """Its addresses for the ranks: HOST:PORT, or several, one of which works."""
        return ",".join(self._reception.contacts)

    def expect(self, token: str, ranks: int) -> None:
        """Accept `ranks` ranks that send `token` from now on."""
        self._expected[token] = ranks
        self._found[token] = {}

    def lines(self, token: str, seconds: float, alive: Callable[[], bool]) -> list[FileIO]:
        """Wait for all ranks that send `token`; returns their lines, by rank.

        Raises CrewError after `seconds`, if the job is not `alive` any more, or if it has another number of ranks.
        """
        deadline = time.monotonic() + seconds
        found, count = self._found[token], self._expected[token]
        while len(found) < count:
            living = alive()
            self._receive(0.1 if living else 0.0)
            if token in self._odd:
                raise CrewError(
                    f"its ranks say that they are {self._odd[token]}, and {count} were started: the worker and mpirun "
                    "are not of one MPI"
                )
            if not living and len(found) < count:
                raise CrewError("its job ended before all ranks were there")
            if time.monotonic() > deadline:
                raise CrewError(f"after {seconds:.0f} s only ranks {sorted(found)} of {count} were there")
        del self._expected[token], self._found[token]
        return [line for _, line in sorted(found.items())]

    def close(self) -> None:
        """Stop listening."""
        self._reception.close()

    def _receive(self, seconds: float) -> None:
        sockets = {one.fileno(): one for one in self._reception.sockets()}
        poll = select.poll()
        for descriptor in sockets:
            poll.register(descriptor, select.POLLIN)
        ready = poll.poll(seconds * 1000)
        now = time.monotonic()
        for descriptor, _ in ready:
            if came := self._reception.receive(sockets[descriptor], now):
                self._greet(*came)
        self._reception.look(now)

    def _greet(self, connection: socket.socket, line: bytes) -> None:
        hello = _HELLO.fullmatch(line)
        tokens = [one for one in self._expected if hello and hmac.compare_digest(hello[1], one.encode())]
        if hello is None or not tokens:  # a stranger
            connection.close()
            return
        (token,), rank, size = tokens, int(hello[2]), int(hello[3])
        if size != self._expected[token] or rank >= size:
            self._odd[token] = size
            connection.close()
            return
        self._found[token][rank] = _line_of(connection)


def _line_of(connection: socket.socket) -> FileIO:
    """The connection as a file; closing the file closes the connection."""
    connection.setblocking(True)  # ranks send a line in one piece
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return open(connection.detach(), "r+b", buffering=0)


def answers(lines: Sequence[FileIO], seconds: float) -> list[str]:
    """A line from each, all within `seconds`; "" for ranks without one by then, or when one ended."""
    deadline = time.monotonic() + seconds
    found = dict.fromkeys(range(len(lines)), "")
    left = {line.fileno(): at for at, line in enumerate(lines)}
    poll = select.poll()
    for descriptor in left:
        poll.register(descriptor, select.POLLIN)
    while left and (wait := deadline - time.monotonic()) > 0:
        for descriptor, _ in poll.poll(wait * 1000):
            said = ""
            with suppress(OSError):
                said = lines[left[descriptor]].readline(LINE_BYTES).decode(errors="replace").strip()
            if not said:
                return list(found.values())  # the others would wait for this rank for ever
            found[left.pop(descriptor)] = said
            poll.unregister(descriptor)
    return list(found.values())
