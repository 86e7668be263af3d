"""Streams of paper for tests of the CUDA engine: every order that a GPU might choose, without one.

A folder of tests is no package, so the tests get this module as the fixture `paper` (tests/lms/conftest.py).
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from lms.memory.host import HostSlab
from lms.torch.cuda.engine import CudaEngine
from lms.torch.cuda.streams import Event, Stream

SIZE = 4096
BANDWIDTH = 1e6  # bytes in a logical second
NAMES = ("compute", "out", "back")


@dataclass(eq=False)
class PaperEvent:
    stream: str
    time: float | None = None  # None: not reached


@dataclass(eq=False)
class PaperStream:
    name: str
    clock: float = 0.0
    queue: deque[tuple[str, object, float]] = field(default_factory=deque)


class PaperStreams:
    """Streams that do nothing until the host blocks, and then run in the order that is worst.

    `order` says which stream runs first of those that can; `lost` are waits that are left out, each as
    (stream that waits, stream that is waited for). Memory comes from a pool that gives a block out again as soon as its
    tensor is gone, as the real one does for work of the stream that the block belongs to.
    """

    def __init__(
        self, order: tuple[str, ...] = NAMES, lost: tuple[str, str] | None = None, blocks: int = 8, block: int = SIZE
    ) -> None:
        self.device = torch.device("cpu")
        self.order, self.lost = order, lost
        self.all = {name: PaperStream(name) for name in (*NAMES, "side")}
        self.out: Stream = self.all["out"]
        self.back: Stream = self.all["back"]
        self._current = "compute"
        self._captured = False
        self._lock = threading.RLock()  # the file's threads use streams too
        self._block = block
        self._arena = bytearray(blocks * block)
        self._free = list(range(blocks))

    # What the engine asks of a GPU

    def current(self) -> Stream:
        return self.all[self._current]

    def capturing(self) -> bool:
        return self._captured

    def record(self, stream: Stream) -> Event:
        self._allowed()
        assert isinstance(stream, PaperStream)
        event = PaperEvent(stream.name)
        with self._lock:
            stream.queue.append(("event", event, 0.0))
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        self._allowed()
        assert isinstance(stream, PaperStream)
        assert isinstance(event, PaperEvent)
        with self._lock:
            if (stream.name, event.stream) != self.lost:
                stream.queue.append(("wait", event, 0.0))

    def copy(self, stream: Stream, destination: torch.Tensor, source: torch.Tensor) -> None:
        self._allowed()
        # By address: a queued copy on a GPU keeps nothing alive.
        assert isinstance(stream, PaperStream)
        there, here = memory_of(destination), memory_of(source)

        def copy() -> None:
            there[:] = here

        with self._lock:
            stream.queue.append(("run", copy, source.nbytes / BANDWIDTH))

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        assert isinstance(stream, PaperStream)
        before, self._current = self._current, stream.name
        try:
            yield
        finally:
            self._current = before

    def empty(self, nbytes: int) -> torch.Tensor:
        assert nbytes <= self._block
        at = min(self._free)
        self._free.remove(at)
        view = memoryview(self._arena)[at * self._block : at * self._block + nbytes]
        tensor = torch.frombuffer(view, dtype=torch.uint8)
        weakref.finalize(tensor.untyped_storage(), self._free.append, at)
        return tensor

    def done(self, event: Event) -> bool:
        self._allowed()
        assert isinstance(event, PaperEvent)
        return event.time is not None

    def synchronize(self, event: Event) -> None:
        self._allowed()
        assert isinstance(event, PaperEvent)
        with self._lock:
            while event.time is None:
                assert self._step(), "a deadlock"

    def seconds(self, start: Event, end: Event) -> float:
        assert isinstance(start, PaperEvent)
        assert isinstance(end, PaperEvent)
        assert start.time is not None
        assert end.time is not None
        return end.time - start.time

    # What a model would do

    def launch(self, work: Callable[[], None], seconds: float = 0.001) -> None:
        with self._lock:
            self.all[self._current].queue.append(("run", work, seconds))

    def fill(self, tensor: torch.Tensor, value: int) -> None:
        memory = memory_of(tensor)

        def fill() -> None:
            memory[:] = bytes([value]) * len(memory)

        self.launch(fill)

    def look(self, tensor: torch.Tensor, seen: dict[int, bytes], key: int) -> None:
        memory = memory_of(tensor)

        def look() -> None:
            seen[key] = bytes(memory)

        self.launch(look)

    @contextmanager
    def capture(self) -> Iterator[None]:
        """As a CUDA graph's capture: nothing may be asked of events or copied meanwhile."""
        self._captured = True
        try:
            yield
        finally:
            self._captured = False

    def _allowed(self) -> None:
        assert not self._captured, "operation not permitted when stream is capturing"

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        before, self._current = self._current, name
        yield
        self._current = before

    def finish(self) -> None:
        with self._lock:
            while self._step():
                pass
            assert all(not stream.queue for stream in self.all.values()), "a deadlock"

    def _step(self) -> bool:
        for name in (*self.order, "side"):
            stream = self.all[name]
            if not stream.queue:
                continue
            kind, what, seconds = stream.queue[0]
            if kind == "wait":
                assert isinstance(what, PaperEvent)
                if what.time is None:
                    continue
                stream.clock = max(stream.clock, what.time)
            elif kind == "event":
                assert isinstance(what, PaperEvent)
                what.time = stream.clock
            else:
                assert callable(what)
                what()
                stream.clock += seconds
            stream.queue.popleft()
            return True
        return False


class PromptStreams(PaperStreams):
    """Streams whose copies are over at once, so that PyTorch's own operations, which do not wait, find their bytes."""

    def copy(self, stream: Stream, destination: torch.Tensor, source: torch.Tensor) -> None:
        super().copy(stream, destination, source)
        self.finish()


class PaperManaged:
    """Managed memory that is on a GPU or not, as the streams' queues have it; it holds its bytes in either case.

    If it is `prompt`, each move is over at once, and what is discarded becomes nonsense.
    """

    def __init__(self, streams: PaperStreams, *, discards: bool = True, prompt: bool = False) -> None:
        self.discards = discards
        self._prompt = prompt
        self.sizes: dict[int, int] = {}  # of what is allocated, by address
        self.on_gpu: set[int] = set()
        self.most = 0  # bytes that were there at once
        self.streams = streams
        self._memory: dict[int, Any] = {}

    def allocate(self, nbytes: int) -> int:
        memory = (ctypes.c_char * nbytes)()
        address = ctypes.addressof(memory)
        self._memory[address], self.sizes[address] = memory, nbytes
        return address

    def free(self, address: int) -> None:
        self.streams.finish()
        del self._memory[address], self.sizes[address]
        self.on_gpu.discard(address)

    def prefetch(self, stream: Stream, address: int, nbytes: int, *, back: bool) -> None:
        assert nbytes == self.sizes[address]
        self._queue(stream, lambda: self._place(address, back=back), nbytes)

    def discard(self, stream: Stream, address: int, nbytes: int) -> None:
        assert self.discards
        assert nbytes == self.sizes[address]
        self._queue(stream, lambda: self._place(address, back=False), 0)
        if self._prompt:
            ctypes.memset(address, 0xA5, nbytes)

    def tensor(self, owner: object, address: int, nbytes: int) -> torch.Tensor:
        view = (ctypes.c_char * nbytes).from_address(address)
        view.owner = owner  # type: ignore[attr-defined]
        return torch.frombuffer(view, dtype=torch.uint8)

    def _queue(self, stream: Stream, move: Callable[[], None], nbytes: int) -> None:
        with self.streams.using(stream):
            self.streams.launch(move, nbytes / BANDWIDTH)
        if self._prompt:
            self.streams.finish()

    def _place(self, address: int, *, back: bool) -> None:
        (self.on_gpu.add if back else self.on_gpu.discard)(address)
        self.most = max(self.most, sum(self.sizes[one] for one in self.on_gpu))


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The tensor's memory, without the tensor: what a queued operation holds."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def nothing(*_: object) -> None:
    pass


def host_slab(limit: int | None = None, segment: int = 8 * SIZE) -> HostSlab:
    return HostSlab(nothing, nothing, limit=limit, segment=segment)


def engine_on(streams: PaperStreams, *, limit: int | None = None, verify: bool = False) -> CudaEngine:
    return CudaEngine(streams, host_slab(limit), None, verify=verify)


def run_pass(streams: PaperStreams, engine: CudaEngine, *, records: int = 4) -> dict[int, bytes]:
    """A forward and a backward in as little memory as can be; what the backward saw of each record."""
    seen: dict[int, bytes] = {}
    slots = []
    for value in range(1, records + 1):
        x = streams.empty(SIZE)
        streams.fill(x, value)
        slot, copy = engine.offload(x)
        slots.append((value, slot))
        del x
        if value < records:  # the last one is still in flight when the backward asks for it
            copy.wait()  # from here on the memory may serve what comes next
        del copy
        scratch = streams.empty(SIZE)
        streams.fill(scratch, 200 + value)
        del scratch
    for value, slot in reversed(slots):
        scratch = streams.empty(SIZE)
        streams.fill(scratch, 100 + value)
        del scratch  # the next tensor is given this block, while the fill may still be queued
        y, copy = engine.reload(slot)
        copy.wait()
        streams.look(y, seen, value)
        engine.discard(slot)
        del y, copy
    streams.finish()
    return seen
