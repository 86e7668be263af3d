"""The order between calls and a GPU's work, for tensors in a GPU's memory. Host memory needs none.

libddl reads and writes such tensors once the stream that it was told of has done what it was given before, and says
that a call is over when its result is in memory. What is left to do then (copies back to where the result belongs) is
done on that stream again, and whoever waits for the call has their own stream wait for that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ddl import library


class Order:
    """That of one call, which was made on PyTorch's current stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream = torch.cuda.current_stream(device)
        self._finished: torch.cuda.Event | None = None

    @contextmanager
    def told(self) -> Iterator[None]:
        """Calls of libddl that this thread makes meanwhile are ordered behind the stream."""
        library.call("ddl_set_stream", self._stream.cuda_stream)
        try:
            yield
        finally:
            library.call("ddl_set_stream", None)

    def run(self, step: Callable[[], None]) -> None:
        """Do something on the stream, on whatever thread."""
        with torch.cuda.stream(self._stream):
            step()

    def finish(self, step: Callable[[], None]) -> None:
        """Do the finishing step on the stream."""
        self.run(step)
        self._finished = self._stream.record_event()

    def follow(self) -> None:
        """Make the current stream wait for the finishing step."""
        if self._finished is not None:
            torch.cuda.current_stream(self.device).wait_event(self._finished)


def order_of(tensors: Sequence[Tensor]) -> Order | None:
    """That of a call with these tensors, which are in one memory; None: it is the host's, or there are none."""
    return Order(tensors[0].device) if tensors and tensors[0].is_cuda else None
