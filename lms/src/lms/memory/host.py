"""The host tier: page-locked memory that a GPU copies to and from on its own, carved by LMS.

A framework's own allocator rounds each request up to a power of two and pins in the middle of a step. Here memory is
registered in a few large segments, byte for byte what is used, and carved with first fit.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from lms.errors import SpillError
from lms.memory.file import address_of, page_memory
from lms.memory.slab import Slab, round_up

SEGMENT = 256 << 20  # bytes: locking fewer at a time costs more calls, more would claim what a small job never needs
_SPARE = 1.1  # times the most that was used is kept: placement, and so the gaps, differ from step to step
_THREADS = 8  # that clear pages. An H100's host locked 2.8 GB/s with one and 15 GB/s with eight

Register = Callable[[int, int], None]  # (address, nbytes): lock the pages; raises SpillError
Unregister = Callable[[int], None]


class _Segment:
    def __init__(self, nbytes: int) -> None:
        self.memory = page_memory(nbytes)
        self.address = address_of(self.memory)
        self.slab = Slab(nbytes)
        with contextlib.suppress(OSError, AttributeError):
            # A forked DataLoader worker must not copy locked pages, and has no use for them.
            self.memory.madvise(mmap.MADV_DONTFORK)
        _clear(self.address, nbytes)


def _clear(address: int, nbytes: int) -> None:
    """Have the kernel fill fresh pages with zeros now, by several threads. Without threads, locking does it."""
    threads = min(_THREADS, len(os.sched_getaffinity(0)))
    piece = -(-nbytes // threads)
    with contextlib.suppress(RuntimeError), ThreadPoolExecutor(threads) as pool:  # none can be started any more
        starts = range(0, nbytes, piece)
        list(pool.map(lambda start: ctypes.memset(address + start, 0, min(piece, nbytes - start)), starts))


@dataclass(frozen=True)
class Block:
    """Bytes of one segment, page-aligned: `memory[offset : offset + nbytes]`, which is at `address`."""

    memory: mmap.mmap
    offset: int
    nbytes: int
    address: int
    segment: object


class HostSlab:
    """Page-locked memory of at most `limit` bytes (None: as much as the host gives), that grows by segments.

    When the host refuses a segment, the slab asks for what is needed and no more; what the host refuses then is not
    asked for again, since each attempt would cost a step its time. `refused` says why; it is None until then.

    `register` and `unregister` lock and unlock pages. Not thread-safe. It grows only in `allocate`, before a copy
    begins, and gives memory back only in `trim` and at `close`: locking costs more than a step can spare.
    """

    def __init__(
        self, register: Register, unregister: Unregister, *, limit: int | None = None, segment: int = SEGMENT
    ) -> None:
        self.limit = limit
        self.reserved = 0  # bytes registered, which is what the limit bounds
        self.peak = 0  # most of them so far
        self.refused: str | None = None
        self._least_refused: int | None = None  # bytes
        self._register, self._unregister = register, unregister
        self._segment = segment
        self._segments: list[_Segment] = []
        self._most_used = 0  # since the last `trim`
        self._proven = 0  # bytes that were found to be needed after a `trim`
        self._trimmed = False

    @property
    def used(self) -> int:
        """Bytes in blocks now."""
        return sum(segment.slab.used for segment in self._segments)

    def allocate(self, nbytes: int) -> Block | None:
        """A block of `nbytes`, or None when the limit or the host leaves no room."""
        for segment in self._segments:
            offset = segment.slab.allocate(nbytes)
            if offset is not None:
                return self._block(segment, offset, nbytes)
        need = round_up(max(nbytes, 1))
        room = need + self._segment if self.limit is None else self.limit - self.reserved
        if need > room or (self._least_refused is not None and need >= self._least_refused):
            return None
        grown = self._grow(max(need, min(self._segment, room) // mmap.PAGESIZE * mmap.PAGESIZE), need)
        if grown is None:
            return None
        offset = grown.slab.allocate(nbytes)
        assert offset is not None
        return self._block(grown, offset, nbytes)

    def free(self, block: Block) -> None:
        """Give a block back to later ones. No copy may use it any more."""
        assert isinstance(block.segment, _Segment)
        block.segment.slab.free(block.offset)

    def trim(self) -> None:
        """Unlock segments without blocks that were not needed since the last call. No copy may use them any more.

        Nothing is unlocked if the host has refused more: others may take it then.
        """
        if self.refused is not None:
            return
        least = max(_SPARE * self._most_used, self._proven)
        for segment in [one for one in self._segments if not one.slab.used]:
            nbytes = len(segment.memory)
            if self.reserved - nbytes >= least:
                self._unregister(segment.address)
                self._segments.remove(segment)
                self.reserved -= nbytes
                self._trimmed = True
        self._most_used = self.used

    def close(self) -> None:
        """Unlock everything and let it go. No copy may be in flight. Idempotent."""
        while self._segments:
            self._unregister(self._segments.pop().address)
        self.reserved = 0

    def _grow(self, wanted: int, need: int) -> _Segment | None:
        """A segment of `wanted` bytes, or else of `need`; None when the host refuses both."""
        segment: _Segment | None = None
        for nbytes in dict.fromkeys((wanted, need)):
            try:
                segment = _Segment(nbytes)
                self._register(segment.address, nbytes)
            except SpillError as refused:
                self.refused = str(refused)  # not the error: its frames would keep the segment
                self._segment = 0
                segment = None  # its pages are resident, and the next one needs the room
                continue
            self._segments.append(segment)
            self.reserved += nbytes
            self.peak = max(self.peak, self.reserved)
            if self._trimmed:
                self._proven = self.reserved
            return segment
        self._least_refused = need
        return None

    def _block(self, segment: _Segment, offset: int, nbytes: int) -> Block:
        self._most_used = max(self._most_used, self.used)
        return Block(segment.memory, offset, nbytes, segment.address + offset, segment)
