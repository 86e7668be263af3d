"""What ranks tell one another beside their collectives: objects of a few bytes, in the order of sending."""

from __future__ import annotations

import pickle
import time

import torch

from ddl.communicator import Communicator
from ddl.request import Request
from ddl.torch import point_to_point
from ddl.torch.point_to_point import ANY_RANK

_LENGTH, _CONTENT = 0, 1  # tags
_FLUSH_SECONDS = 2.0  # a rank that does not take messages for longer is gone, or will be told by the others
_NAP = 1e-3


class Messages:
    """Over a communicator that nobody else sends through. One thread at a time calls it. Its calls raise DDLError."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._sending: list[Request[None]] = []

    def send(self, rank: int, message: object) -> None:
        """Send an object, for which the rank need not wait yet."""
        content = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
        self._sending = [request for request in self._sending if not request.test()]
        self._sending.append(point_to_point.send(torch.tensor([content.numel()]), rank, _LENGTH, self._comm))
        self._sending.append(point_to_point.send(content, rank, _CONTENT, self._comm))

    def flush(self) -> None:
        """Wait a moment until all that was sent is on its way."""
        deadline = time.monotonic() + _FLUSH_SECONDS
        while any(not request.test() for request in self._sending) and time.monotonic() < deadline:
            time.sleep(_NAP)

    def receive(self) -> tuple[int, object] | None:
        """A rank that has sent something, and what it sent; None where nothing is here. Does not block."""
        if self._comm.size == 1:
            return None
        rank = point_to_point.probe(ANY_RANK, _LENGTH, self._comm)
        if rank is None:
            return None
        length = torch.empty(1, dtype=torch.int64)
        point_to_point.receive(length, rank, _LENGTH, self._comm).wait()
        content = torch.empty(int(length), dtype=torch.uint8)
        point_to_point.receive(content, rank, _CONTENT, self._comm).wait()
        return rank, pickle.loads(content.numpy().tobytes())

    def check(self, rank: int) -> None:
        """Raises PeerLostError or ShutdownError where nothing will come from a rank any more."""
        point_to_point.probe(rank, _LENGTH, self._comm)
