"""What ranks say to one another beside their collectives: objects of a few bytes, in the order of sending."""

from __future__ import annotations

import pickle
import threading

import torch

from ddl.communicator import Communicator
from ddl.request import Request
from ddl.torch import point_to_point
from ddl.torch.point_to_point import ANY_RANK

_LENGTH, _CONTENT = 0, 1  # tags


class Words:
    """Over a communicator that nobody else sends messages through. Any thread may call it. Its calls raise DDLError."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm
        self._sending: list[Request[None]] = []
        self._out = threading.Lock()  # a word is two messages, which stay together
        self._in = threading.Lock()

    def send(self, rank: int, word: object) -> None:
        """Say something to a rank, which need not listen yet."""
        content = torch.frombuffer(bytearray(pickle.dumps(word)), dtype=torch.uint8)
        with self._out:
            self._sending = [request for request in self._sending if not request.test()]
            self._sending.append(point_to_point.send(torch.tensor([content.numel()]), rank, _LENGTH, self.comm))
            self._sending.append(point_to_point.send(content, rank, _CONTENT, self.comm))

    def take(self) -> tuple[int, object] | None:
        """The rank that has said something, and what it said; None where nobody has."""
        with self._in:
            rank = point_to_point.probe(ANY_RANK, _LENGTH, self.comm)
            if rank is None:
                return None
            length = torch.empty(1, dtype=torch.int64)
            point_to_point.receive(length, rank, _LENGTH, self.comm).wait()
            content = torch.empty(int(length), dtype=torch.uint8)
            point_to_point.receive(content, rank, _CONTENT, self.comm).wait()
        return rank, pickle.loads(content.numpy().tobytes())

    def check(self, rank: int) -> None:
        """Raises PeerLostError or ShutdownError where nothing will come from a rank any more."""
        point_to_point.probe(rank, _LENGTH, self.comm)
