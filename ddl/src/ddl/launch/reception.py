"""A listener that strangers may find: a connection must soon send the right first line, and none can block it.

Anybody who reaches the port can connect and send anything. So the first line has a limited length and time, and the
number of connections without one is limited. The caller reads the line; it should check the key before the rest.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

LOOPBACK = "127.0.0.1"
GREETING_SECONDS = 5.0  # for a connection to send its first line
STRANGERS = 64  # connections without a first line, beyond the expected ones
BACKLOG = 1024  # connections that the kernel holds until they are taken
LINE_BYTES = 64  # at most, of the first line


class Reception:
    """Listeners, and connections that have not sent their first line yet. Nothing here blocks."""

    def __init__(self, addresses: Sequence[str], expected: int) -> None:
        """Listen at `addresses` of this host, or the loopback's, for `expected` connections that may come at once."""
        self._listeners = [socket.create_server((one, 0), backlog=BACKLOG) for one in addresses or (LOOPBACK,)]
        for listener in self._listeners:
            listener.setblocking(False)
        self._most = expected + STRANGERS
        self._strangers: dict[socket.socket, tuple[float, bytes]] = {}  # oldest first: since when, what it sent
        self._listens = True

    @property
    def contacts(self) -> list[str]:
        """Its addresses as HOST:PORT, in the order given."""
        return ["{}:{}".format(*listener.getsockname()) for listener in self._listeners]

    def sockets(self) -> list[socket.socket]:
        """The sockets on which something may arrive."""
        return [*(self._listeners if self._listens else []), *self._strangers]

    def receive(self, ready: socket.socket, now: float) -> tuple[socket.socket, bytes] | None:
        """Read from one of `sockets`. Returns a connection and its first line, or None if there is no line yet.

        The non-blocking connection is then the caller's. Bytes after the line are dropped.
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
        """Drop connections that were silent for too long, and listen again after a pause. Call it now and then."""
        self._listens = self._listeners[0].fileno() >= 0
        for connection, (since, _) in list(self._strangers.items()):
            if since < now - GREETING_SECONDS:
                self._drop(connection)

    def close(self) -> None:
        """Stop listening, and drop the connections without a first line."""
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
        except OSError:  # no descriptor or memory is left: pause until the next `look`
            self._listens = False
            return
        connection.setblocking(False)
        self._strangers[connection] = now, b""
        if len(self._strangers) > self._most:
            self._drop(next(iter(self._strangers)))  # an expected one sends its line at once

    def _drop(self, connection: socket.socket) -> None:
        del self._strangers[connection]
        connection.close()
