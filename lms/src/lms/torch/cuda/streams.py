"""Copies on streams: what the CUDA engine asks of a GPU, small enough for a test to imitate.

The rules that keep a copy right, each with the place that keeps it:

1. The copy stream waits for what the compute stream was given so far: queued work may still write the source, or use
   the block that the destination was given (`start`).
2. A copy back waits for the copy out that fills the host's side (`start`, `after`).
3. A use of what a copy brought waits for its end (`StreamCopy.wait`).
4. Both sides stay alive until the copy's end is known to the host, or ordered before all later work of the stream
   whose pool the device's side belongs to (`StreamCopy.keep`). Never `record_stream`: it holds memory back until the
   allocator happens to look, which is past the budget.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from contextlib import AbstractContextManager

import numpy
import numpy.typing
import torch

from lms.errors import LMSError, afresh
from lms.memory.host import Block
from lms.memory.transfer import Memory

Stream = torch.cuda.Stream
Event = torch.cuda.Event


class CudaStreams:
    """The streams of one GPU: the caller's own, and one for each direction. Tests imitate them.

    Only `synchronize` blocks the host. Streams compare equal when they are the same one.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self.out = Stream(self.device)  # copies from the device to the host
        self.back = Stream(self.device)  # copies from the host to the device

    def current(self) -> Stream:
        """The stream that computes for this thread; the backward pass runs in a thread with one of its own."""
        return torch.cuda.current_stream(self.device)

    def capturing(self) -> bool:
        """Whether what the current stream is given is captured in a CUDA graph, and not run."""
        return torch.cuda.is_current_stream_capturing()

    def record(self, stream: Stream) -> Event:
        """An event, with time, behind all that `stream` was given so far."""
        event = Event(enable_timing=True)
        event.record(stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        """Let what `stream` is given from now on begin after `event`."""
        stream.wait_event(event)

    def copy(self, stream: Stream, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy on `stream`; the host's side must be page-locked, or the driver makes the host wait."""
        with self.using(stream):
            destination.copy_(source, non_blocking=True)

    def using(self, stream: Stream) -> AbstractContextManager[object]:
        """Make `stream` the current one of this thread on its own GPU; other GPUs keep theirs."""
        return torch.cuda.stream(stream)

    def empty(self, nbytes: int) -> torch.Tensor:
        """Uninitialised bytes on the GPU, from the current stream's pool."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def done(self, event: Event) -> bool:
        """Whether `event` was reached."""
        return bool(event.query())

    def synchronize(self, event: Event) -> None:
        """Block the host until `event` is reached."""
        event.synchronize()

    def seconds(self, start: Event, end: Event) -> float:
        """Time between two events that were reached."""
        return float(start.elapsed_time(end)) / 1e3


class StreamCopy:
    """A copy on a stream. `keep` is the device's side, for as long as rule 4 asks."""

    def __init__(self, streams: CudaStreams, nbytes: int, keep: torch.Tensor, start: Event, end: Event) -> None:
        self.nbytes = nbytes
        self.failed: LMSError | None = None
        self.keep: torch.Tensor | None = keep
        self.span = None  # the host does not know
        self.marks: tuple[Event, Event] = start, end
        self.stalls: list[tuple[Event, Event]] = []  # what waited for it: just before, and just after
        self._streams = streams
        self._pool = streams.current()
        self._ordered: list[Stream] = []
        self._over = False

    def done(self) -> bool:
        """Whether the copy's end was reached; lets go of the device's side then."""
        if not self._over and self._streams.done(self.marks[1]):
            self._over = True
            self.keep = None
        return self._over

    def wait(self) -> None:
        """Let the current stream wait for the copy. The host goes on, so no time is known yet: see `stalls`."""
        if self.failed is not None:
            raise afresh(self.failed)
        if not self.done():
            current = self._streams.current()
            if current not in self._ordered:
                before = self._streams.record(current)
                self._streams.wait(current, self.marks[1])
                self.stalls.append((before, self._streams.record(current)))
                self._ordered.append(current)
            if current == self._pool:  # another stream's wait says nothing about this pool's next user
                self.keep = None

    def synchronize(self) -> None:
        """Block the host until the copy is over. Raises its error if it failed."""
        self._streams.synchronize(self.marks[1])
        self.done()
        if self.failed is not None:
            raise afresh(self.failed)

    def seconds(self) -> float:
        """How long the copy kept its stream busy; to be asked when it is done."""
        return self._streams.seconds(*self.marks)


def start(
    streams: CudaStreams,
    stream: Stream,
    destination: torch.Tensor,
    source: torch.Tensor,
    *,
    keep: torch.Tensor,
    after: Iterable[Event] = (),
) -> StreamCopy:
    """Queue a copy on `stream` behind all work of the current stream and behind the events `after`.

    To be called when both sides are allocated: the allocation itself may queue work, such as a fill.
    """
    streams.wait(stream, streams.record(streams.current()))
    for event in after:
        streams.wait(stream, event)
    begin = streams.record(stream)
    streams.copy(stream, destination, source)
    return StreamCopy(streams, source.nbytes, keep, begin, streams.record(stream))


class Staged(Memory):
    """Device memory as a thread that writes or reads a file sees it: each piece goes through one pinned block.

    Made in the thread that computes, so that the copies come behind what its stream was given so far; used by one
    thread, which waits for each piece, so that the block is free for the next one.
    """

    def __init__(self, streams: CudaStreams, stream: Stream, tensor: torch.Tensor, block: Block) -> None:
        super().__init__(block.address)
        self._streams, self._stream, self._block = streams, stream, block
        self._tensor = tensor
        self._ready = streams.record(streams.current())

    def fill(self, start: int, stop: int) -> int:
        """Bring bytes from the device; the block's address."""
        self._copy(host_tensor(self._block, stop - start), self._tensor[start:stop])
        return self.address

    def room(self, start: int, stop: int) -> int:
        """The block's address."""
        return self.address

    def drain(self, start: int, stop: int) -> None:
        """Bring bytes to the device."""
        self._copy(self._tensor[start:stop], host_tensor(self._block, stop - start))

    def _copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        self._streams.wait(self._stream, self._ready)
        self._streams.copy(self._stream, destination, source)
        self._streams.synchronize(self._streams.record(self._stream))


def host_tensor(block: Block, nbytes: int | None = None) -> torch.Tensor:
    """The block's first `nbytes`, or all of them, as a uint8 tensor."""
    return over(block.memory, block.offset, block.nbytes if nbytes is None else nbytes)


def over(memory: mmap.mmap | numpy.typing.NDArray[numpy.uint8], offset: int, nbytes: int) -> torch.Tensor:
    """A uint8 tensor over a part of `memory`, which lives as long as the tensor does."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8, device="cpu")  # frombuffer refuses none
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=offset)


def within(memory: torch.Tensor, offset: int, nbytes: int) -> torch.Tensor:
    """A uint8 tensor over a part of a host tensor, with a storage of just that part. It keeps `memory` alive."""
    return over(memory.numpy(), offset, nbytes)
