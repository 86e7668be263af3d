"""Copies between memory and a file, past the page cache, by the code with which the runtime swaps."""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy

from lms.link.series import Direction
from lms.link.sweep import Copy
from lms.memory.file import FileSlab, Place, address_of, page_memory

_LEAST = 1 << 20  # bytes of the file
_PIECE = 32 << 20  # bytes of one write that is not timed


class FileProbe:
    """A slab file of at most `largest` bytes in `folder`, with timed copies to and from it.

    One thread each way, one copy at a time, each at the place behind the one before: what the runtime does. `memory`
    gives so many bytes that start on a page. Raises SpillError when no file can be made there, and from a copy when the
    disk refuses it.
    """

    def __init__(self, folder: Path, largest: int, memory: Callable[[int], mmap.mmap] = page_memory) -> None:
        self.file = FileSlab(folder)
        self.largest = largest
        self._allocate = memory
        self._written = 0  # bytes from the file's start that hold something
        self._memory: tuple[mmap.mmap, mmap.mmap] | None = None  # what is written, and what is read into

    @property
    def via(self) -> str:
        """How the bytes travel: past the page cache, or through it if the file system refuses O_DIRECT."""
        return "O_DIRECT" if self.file.direct else "page cache"

    def close(self) -> None:
        """Close the file, which frees its room, and let the memory go. Idempotent."""
        self.file.close()
        self._memory = None

    def shrink(self, largest: int) -> None:
        """Use no more than the file's first `largest` bytes, or _LEAST, from now on: the disk is too slow for more."""
        self.largest = min(self.largest, max(largest, _LEAST))

    @contextmanager
    def copies(self, direction: Direction) -> Iterator[Copy]:
        """A function that copies so many bytes in `direction`; with `both` so many each way at once."""
        both = direction == "both"
        if direction != "out":
            self._fill()
        addresses = [address_of(memory) for memory in self._ready()]
        middle = self.largest // 2  # `both` reads from the first half and writes to the second
        out = _Cursor(middle if both else 0, self.largest)
        back = _Cursor(0, middle if both else self.largest)
        with ThreadPoolExecutor(1) as other:

            def write(nbytes: int) -> None:
                place = Place(out.advance(nbytes), nbytes, 0)
                self.file.write(place, addresses[0])
                self._written = max(self._written, place.offset + nbytes)

            def read(nbytes: int) -> None:
                self.file.read(Place(back.advance(nbytes), nbytes, 0), addresses[1])

            def copy(nbytes: int) -> float:
                begin = time.perf_counter()
                if direction == "out":
                    write(nbytes)
                elif direction == "back":
                    read(nbytes)
                else:
                    writing = other.submit(write, nbytes)
                    read(nbytes)
                    writing.result()
                return time.perf_counter() - begin

            yield copy

    def _ready(self) -> tuple[mmap.mmap, mmap.mmap]:
        """The memory, filled: pages that are there already, as those of a pool."""
        if self._memory is None:
            self._memory = self._allocate(self.largest), self._allocate(self.largest)
            _noise(self._memory[0])
            numpy.frombuffer(self._memory[1], numpy.uint8).fill(0)
        return self._memory

    def _fill(self) -> None:
        """Write the rest of the file: reading a hole returns zeros without asking the disk."""
        source = address_of(self._ready()[0])
        while self._written < self.largest:
            nbytes = min(_PIECE, self.largest - self._written)
            self.file.write(Place(self._written, nbytes, 0), source + self._written)
            self._written += nbytes


class _Cursor:
    """Places one behind the other between two offsets, and from the first again when they are used up."""

    def __init__(self, first: int, end: int) -> None:
        self._first, self._end, self._at = first, end, first

    def advance(self, nbytes: int) -> int:
        if self._at + nbytes > self._end:
            self._at = self._first
        at = self._at
        self._at += nbytes
        return at


def _noise(memory: mmap.mmap) -> None:
    """Fill memory with random bytes, which no disk can compress and no host can deduplicate."""
    words = len(memory) // 8
    numpy.frombuffer(memory, numpy.uint64, words)[:] = numpy.random.Generator(numpy.random.SFC64()).integers(
        1 << 64, size=words, dtype=numpy.uint64, endpoint=False
    )
