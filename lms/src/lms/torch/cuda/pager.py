"""A GPU's pager: managed memory, which leaves to the host and is prefetched before it is used."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Sequence

import torch

from lms.core.residency import Move, Residency
from lms.memory.pager import PagerUsage
from lms.torch.cuda.managed import ManagedMemory
from lms.torch.cuda.streams import CudaStreams, Event
from lms.torch.pager import Pager


class Region:
    """Managed memory, of one tensor at a time."""

    def __init__(self, memory: ManagedMemory, nbytes: int) -> None:
        self.address = memory.allocate(nbytes)
        self.is_taken = False
        self._memory = memory
        self._pid = os.getpid()

    def __del__(self) -> None:
        if hasattr(self, "_pid") and self._pid == os.getpid():
            self._memory.free(self.address)


class Block:
    """A region, and what is known of its last move."""

    def __init__(self, nbytes: int, *, transient: bool) -> None:
        self.nbytes = nbytes
        self.transient = transient
        self.region: Region | None = None
        self.arrival: Event | None = None  # at the GPU, if the computation has not been told to wait for it
        self.pager: weakref.ref[CudaPager] | None = None  # the last session's that had a tensor of it


class CudaPager(Pager):
    """Moves blocks over two streams, beside the computation.

    A block leaves behind all that the computation's stream was given before, and comes back behind what leaves for it.
    So the GPU never holds more than the host has decided, however far the host is ahead. If the host did not foresee a
    use, the driver moves the pages that are touched.
    """

    least = 1 << 20  # the driver moves pages of up to 2 MB
    least_room = 64 << 20
    is_origin = False  # PyTorch's allocator gives tensors memory of its own

    def __init__(self, streams: CudaStreams, memory: ManagedMemory) -> None:
        self.device = streams.device
        self._streams = streams
        self._memory = memory
        self._lock = threading.RLock()
        self._residency: Residency[Block] = Residency()
        self._course: Sequence[Collection[Block]] = ()
        self._freed: deque[tuple[Block, Region]] = deque()  # by tensors' destructors, which may run anywhere
        self._out = self._back = 0
        self._left: Event | None = None  # behind all that was told to leave
        self._running = True

    def block(self, nbytes: int, *, transient: bool = False) -> Block:
        """A block without memory so far."""
        return Block(nbytes, transient=transient)

    def memory(self, block: Block) -> torch.Tensor:
        """Bytes on the GPU: those of the tensor that the block had before, once it is gone."""
        with self._lock:
            self._reclaim()
            region = block.region
            if region is None or region.is_taken:
                block.region = region = Region(self._memory, block.nbytes)
            region.is_taken = True
            block.pager = weakref.ref(self)
            self._move(self._residency.make(block))
            self._fetch(block)
            self._await((block,))
            return self._memory.tensor(_Owner(block, region), region.address, block.nbytes)

    def track(self, block: Block, address: int) -> bool:
        """Whether the tensor at `address` has the block's memory. It may be a former session's."""
        region = block.region
        if region is None or not region.is_taken or region.address != address:
            return False
        with self._lock:
            block.pager = weakref.ref(self)
            self._move(self._residency.make(block) if block not in self._residency else ())
        return True

    def keep(self, nbytes: int, *, fill: bool = False) -> None:
        """Keep at most so many bytes on the GPU."""
        with self._lock:
            self._reclaim()
            self._move(self._residency.keep(max(nbytes, 0)))

    def expect(self, course: Sequence[Collection[Block]]) -> None:
        """Foresee that a step uses these blocks, in this order."""
        with self._lock:
            self._course = course
            self._residency.expect(course)

    def reach(self, position: int | None, used: Collection[Block]) -> None:
        """Have these blocks on the GPU for what the stream is given next, and those of the next position."""
        with self._lock:
            if not self._running:
                return
            self._reclaim()
            self._move(self._residency.use(used, position))
            self._await(used)
            if position is not None:
                self._await(self._course[(position + 1) % len(self._course)])

    def usage(self) -> PagerUsage:
        """Figures. How long the GPU waited for its driver is not known."""
        with self._lock:
            residency = self._residency
            return PagerUsage(residency.nbytes, residency.held, self._out, self._back, waited=0, failed=0)

    def check(self) -> None:
        """Nothing fails behind the host's back."""

    def capturing(self) -> bool:
        """Whether this thread captures a CUDA graph."""
        return self._streams.capturing()

    def stop(self) -> None:
        """Nothing leaves any more; the driver brings back what is touched."""
        with self._lock:
            self._running = False
            while self._freed:
                _forget(*self._freed.popleft())

    def _move(self, moves: Iterable[Move[Block]]) -> None:
        """Queue these moves, in their order."""
        streams, ordered = self._streams, False
        for block, back in moves:
            if back:
                self._fetch(block)
                self._back += block.nbytes
                continue
            if not ordered:  # what was queued before may use what leaves
                streams.wait(streams.out, streams.record(streams.current()))
                ordered = True
            self._finish_arrival(block)
            assert block.region is not None
            self._memory.prefetch(streams.out, block.region.address, block.nbytes, back=False)
            self._left = streams.record(streams.out)
            self._out += block.nbytes

    def _fetch(self, block: Block) -> None:
        """Queue a block's pages to the GPU, behind all that was told to leave."""
        assert block.region is not None
        streams = self._streams
        if self._left is not None:
            streams.wait(streams.back, self._left)
        self._memory.prefetch(streams.back, block.region.address, block.nbytes, back=True)
        block.arrival = streams.record(streams.back)

    def _finish_arrival(self, block: Block) -> None:
        """Have what leaves wait until the block has come."""
        if block.arrival is not None:
            self._streams.wait(self._streams.out, block.arrival)
            block.arrival = None

    def _await(self, blocks: Iterable[Block]) -> None:
        """Let the computation wait until these blocks have come."""
        for block in blocks:
            if block.arrival is not None:
                self._streams.wait(self._streams.current(), block.arrival)
                block.arrival = None

    def _reclaim(self) -> None:
        """Let go of what tensors have freed: it need not be copied when it leaves."""
        streams = self._streams
        while self._freed:
            block, region = self._freed.popleft()
            region.is_taken = False
            if region is block.region and self._memory.discards:
                streams.wait(streams.out, streams.record(streams.current()))
                self._finish_arrival(block)
                self._memory.discard(streams.out, region.address, block.nbytes)
                self._left = streams.record(streams.out)
                self._residency.drop(block)


class _Owner:
    """Lives as long as the tensor that has a block's region."""

    def __init__(self, block: Block, region: Region) -> None:
        self._block = block
        self._region = region

    def __del__(self) -> None:
        pager = self._block.pager() if self._block.pager is not None else None
        if pager is not None and pager._running:
            pager._freed.append((self._block, self._region))
        else:
            _forget(self._block, self._region)


def _forget(block: Block, region: Region) -> None:
    """The region's tensor is gone, and nobody will ask for the region again."""
    if block.region is region:
        block.region = None
