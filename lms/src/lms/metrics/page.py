"""The page of a host: OpenMetrics over HTTP, one port for all ranks of a job on this host.

The first rank that gets a Unix socket of the job's name serves the page; the others hand it their samples through that
socket. If it ends, another one takes its place at its next sample. The socket lies in the abstract namespace, so it
leaves no file, belongs to the same network namespace as the port, and ends with its process. A rank that is killed is
off the page at once, because the kernel closes its end.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lms.metrics.families import BY_NAME, COMMON, FAMILIES, Sample

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

STALE = 30.0  # seconds without a sample after which a rank that lives is off the page: its figures are no news
_SILENT = 10  # seconds after which a connection that asks nothing is closed
_MOST = 1 << 17  # bytes of a sample


class PageTakenError(OSError):
    """The port belongs to another program or another run."""


@dataclass
class _Rank:
    """What the page knows of a rank."""

    connection: socket.socket | None  # None: the rank that serves
    sample: Sample = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    at: float = 0.0  # when the sample came, by the monotonic clock


class Page:
    """This rank's part of the page at `address`:`port`.

    Args:
        port: of TCP, 1 to 65535.
        address: of this host, that the port is opened at.
        labels: this rank's values of COMMON.
        job: names the job whose ranks share the page; None if this process is alone.

    """

    def __init__(self, port: int, address: str, labels: tuple[str, ...], job: str | None) -> None:
        self.port, self.address, self.labels = port, address, labels
        self.job = job
        self._server: _Server | None = None
        self._connection: socket.socket | None = None
        _pages.add(self)

    def publish(self, sample: Sample) -> None:
        """Put the sample on the page. Never blocks. Raises PageTakenError, and OSError for an address not of this host.

        A sample that the rank which serves has no room for is dropped.
        """
        if self._server is None and self._connection is None:
            self._join()
        if self._server is not None:
            self._server.put(sample, self.labels)
        elif self._connection is not None:
            try:
                self._connection.send(json.dumps([self.labels, sample]).encode(), socket.MSG_DONTWAIT)
            except BlockingIOError:
                pass
            except OSError:  # who served has ended
                self._connection.close()
                self._connection = None

    def close(self) -> None:
        """Leave the page; the port closes with the rank that serves it."""
        _pages.discard(self)
        if self._server is not None:
            self._server.close()
        if self._connection is not None:
            self._connection.close()
        self._server = self._connection = None

    def abandon(self) -> None:
        """In a forked child: let go of the parent's sockets, which would outlive it here."""
        if self._server is not None:
            self._server.abandon()
        if self._connection is not None:
            self._connection.close()
        self._server = self._connection = None

    def _join(self) -> None:
        """Serve the page, or connect to the rank that does; neither if that rank is just coming or going."""
        name = f"\0bascule-metrics-{os.getuid()}-{self.port}-{self.job or os.getpid()}"
        door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            door.bind(name)
            door.listen(1024)
            self._server = _Server(door, self.port, self.address)
        except OSError as error:
            door.close()
            if not (error.errno == errno.EADDRINUSE and self.job is not None) or isinstance(error, PageTakenError):
                raise
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                connection.connect(name)
                if _user(connection) != os.getuid():
                    raise PageTakenError(errno.EADDRINUSE, f"port {self.port}: another user's process has its name")
            except ConnectionRefusedError:
                connection.close()
            except BaseException:
                connection.close()
                raise
            else:
                self._connection = connection


class _Server:
    """The page itself: the last sample of each rank, and the HTTP server. Collects what came when it is asked."""

    def __init__(self, door: socket.socket, port: int, address: str) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._door = door
        self._door.setblocking(False)
        self._lock = threading.Lock()
        self._own = _Rank(None)
        self._ranks = [self._own]
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        try:
            self._http, self._thread = start_http_server(port, address, registry)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise PageTakenError(errno.EADDRINUSE, f"port {port} at {address} is taken by another program") from None
        self._http.RequestHandlerClass.timeout = _SILENT  # type: ignore[attr-defined]  # a silent connection costs the training a descriptor

    def put(self, sample: Sample, labels: tuple[str, ...]) -> None:
        """This rank's own sample; takes in the others', so that no queue fills up if nobody asks for the page."""
        with self._lock:
            self._own.sample, self._own.labels, self._own.at = sample, labels, time.monotonic()
            self._take()

    def close(self) -> None:
        """Close the port and the socket."""
        self._door.close()
        self._http.shutdown()  # it looks for its end every half second
        self._http.server_close()
        self._thread.join()
        with self._lock:
            for one in self._ranks:
                if one.connection is not None:
                    one.connection.close()

    def abandon(self) -> None:
        """In a forked child, in which the server's thread does not run and the lock may be held."""
        self._http.socket.close()
        self._door.close()
        for one in self._ranks:
            if one.connection is not None:
                one.connection.close()

    def collect(self) -> Iterator[Metric]:
        """For prometheus_client: the families that some rank has figures of."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        now = time.monotonic()
        with self._lock:
            self._take()
            # By their labels: a series may stand on a page once.
            fresh = {one.labels: one.sample for one in self._ranks if one.sample and now - one.at < STALE}
        for family in FAMILIES:
            rows = [(labels, values) for labels, sample in fresh.items() if (values := sample.get(family.name))]
            if not rows:
                continue
            make = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            metric = make(family.name, family.help, labels=(*COMMON, *family.labels), unit=family.unit)
            for labels, values in rows:
                for own, value in values:
                    metric.add_metric([*labels, *own], value)
            yield metric

    def _take(self) -> None:
        """Take in the ranks that came and the samples that they sent; drop those that have ended. With the lock."""
        with suppress(BlockingIOError):
            while True:
                connection, _ = self._door.accept()
                connection.setblocking(False)
                if _user(connection) == os.getuid():
                    self._ranks.append(_Rank(connection))
                else:
                    connection.close()
        self._ranks = [one for one in self._ranks if one.connection is None or self._read(one, one.connection)]

    def _read(self, rank: _Rank, connection: socket.socket) -> bool:
        """Read all that a rank has sent; False if it has ended, or if it is none of ours."""
        try:
            while message := connection.recv(_MOST):
                labels, sample = json.loads(message)
                rank.labels, rank.sample, rank.at = tuple(labels), _known(sample), time.monotonic()
        except BlockingIOError:
            return True
        except (OSError, ValueError, TypeError, AttributeError):
            pass
        connection.close()
        return False


def _known(sample: Mapping[str, list[tuple[list[str], float]]]) -> Sample:
    """What this version knows of a rank's sample."""
    return {name: values for name, values in sample.items() if name in BY_NAME}


def _user(connection: socket.socket) -> int:
    """The user id of the process at the other end."""
    _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(user)


_pages: weakref.WeakSet[Page] = weakref.WeakSet()


def _after_fork() -> None:
    for page in list(_pages):
        page.abandon()
    _pages.clear()


os.register_at_fork(after_in_child=_after_fork)
