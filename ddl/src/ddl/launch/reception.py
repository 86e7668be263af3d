"""A listener that strangers may find: who connects must say a right first line soon, and nobody can hold it up.

Anybody who reaches the port can connect and say anything. So first lines are bytes of a bounded length within a bounded
time, from a bounded number of connections; what they mean is for the caller to say, who should know the key in them
before he looks at the rest.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

LOOPBACK = "127.0.0.1"
GREETING_SECONDS = 5.0  # for whoever connects to say the first line
STRANGERS = 64  # at most so many beyond those who are expected may be about to say it
BACKLOG = 1024  # connections that the kernel holds until they are taken
LINE_BYTES = 64  # at most, of the first line


class Reception:
    """Listeners, and the connections that have not said their first line yet. Nothing here blocks."""

    def __init__(self, addresses: Sequence[str], expected: int) -> None:
        """Listen at `addresses` of this host, or the loopback's, for `expected` connections that may come at once."""
        self._listeners = [socket.create_server((one, 0), backlog=BACKLOG) for one in addresses or (LOOPBACK,)]
        for listener in self._listeners:
            listener.setblocking(False)
        self._most = expected + STRANGERS
        self._strangers: dict[socket.socket, tuple[float, bytes]] = {}  # oldest first: since when, what they have said
        self._listens = True

    @property
    def contacts(self) -> list[str]:
        """Where it listens, as HOST:PORT, in the order of the addresses."""
        return ["{}:{}".format(*listener.getsockname()) for listener in self._listeners]

    def sockets(self) -> list[socket.socket]:
        """Those on which something may arrive."""
        return [*(self._listeners if self._listens else []), *self._strangers]

    def receive(self, ready: socket.socket, now: float) -> tuple[socket.socket, bytes] | None:
        """Take what has arrived on one of `sockets`: a connection with the first line that it said, or None so far.

        The connection, which does not block, is the caller's from then on. What came after the line is dropped.
        """
        if ready in self._listeners:
            self._accept(ready, now)
        if ready not in self._strangers:
            return None
        since, said = self._strangers[ready]
        try:
            data = ready.recv(LINE_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        line, end, _ = (said + data).partition(b"\n")
        if end and len(line) <= LINE_BYTES:
            del self._strangers[ready]
            return ready, line
        self._strangers[ready] = since, line
        if not data or len(line) > LINE_BYTES:
            self._drop(ready)
        return None

    def look(self, now: float) -> None:
        """To be called now and then: drop those who have been silent for too long, and listen again after a rest."""
        self._listens = self._listeners[0].fileno() >= 0
        for connection, (since, _) in list(self._strangers.items()):
            if since < now - GREETING_SECONDS:
                self._drop(connection)

    def close(self) -> None:
        """Stop listening, and drop those who have not said their line."""
        self._listens = False
        for listener in self._listeners:
            listener.close()
        for connection in list(self._strangers):
            self._drop(connection)

    def _accept(self, listener: socket.socket, now: float) -> None:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor or no memory is left: again after the next look, and not at once
            self._listens = False
            return
        connection.setblocking(False)
        self._strangers[connection] = now, b""
        if len(self._strangers) > self._most:
            self._drop(next(iter(self._strangers)))  # who is expected says his line at once

    def _drop(self, connection: socket.socket) -> None:
        del self._strangers[connection]
        connection.close()
