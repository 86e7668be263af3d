"""Pages blocks of the page pool out to a file and back at the same addresses: `lms/native/pager.h` in C++."""

from __future__ import annotations

import ctypes
import faulthandler
import functools
import mmap
import os
import signal
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from lms.errors import SpillError
from lms.memory.transfer import FileEngine
from lms.units import format_size

PIECE = 8 << 20  # bytes that move at once (kPiece in pager.h)


class PagerUsage(NamedTuple):
    """A pager in figures: bytes, nanoseconds, and an errno."""

    tracked: int
    resident: int
    out: int
    back: int
    waited: int
    failed: int


class PagerFile:
    """A file of blocks. It stays open as long as a block is in it: what is away when a session ends is read later."""

    def __init__(self, library: ctypes.CDLL, number: int) -> None:
        self.number = number  # its descriptor
        weakref.finalize(self, library.lms_pager_release, number).atexit = False


class Block(NamedTuple):
    """Pieces, and their place in a file, for one tensor after another, such as the gradients of a parameter."""

    nbytes: int
    pieces: range
    file: PagerFile
    offset: int
    room: int
    transient: bool


class Pager:
    """Lets the pages of tensors leave, which come back when they are touched. There is one at a time in a process."""

    def __init__(self, library: ctypes.CDLL, engine: FileEngine) -> None:
        self._library = library
        self._engine = engine
        # Makes contexts in which system calls may read what is away. It refers to no pager, and outlives this one.
        self.reading = functools.partial(_reading, library)
        library.lms_pager_number.restype = ctypes.c_uint32
        library.lms_pager_track.argtypes = (
            ctypes.c_uint32, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int,
        )  # fmt: skip
        library.lms_pager_keep.argtypes = (ctypes.c_size_t, ctypes.c_int)
        library.lms_pager_expect.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        library.lms_pager_usage.argtypes = (ctypes.c_void_p, ctypes.c_int)
        self._file = PagerFile(library, os.dup(engine.file.fileno()))
        library.lms_pager_start()
        _stay_first(library)

    def block(self, nbytes: int, *, transient: bool = False) -> Block:
        """Room for a block of `nbytes`. If `transient`, its contents are freed soon after their last use of a step."""
        place = self._engine.reserve(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        count = -(-place.span // PIECE)
        first = self._library.lms_pager_number(count)
        return Block(nbytes, range(first, first + count), self._file, place.offset, place.span, transient)

    def track(self, block: Block, address: int) -> bool:
        """Let the pages of the tensor at `address` leave. False if the tensor does not own a block of the page pool."""
        _, pieces, file, offset, room, transient = block
        return bool(self._library.lms_pager_track(pieces.start, address, file.number, offset, room, int(transient)))

    def keep(self, nbytes: int, *, fill: bool = False) -> None:
        """Keep at most so many bytes of all blocks in memory; with `fill` more, while nothing else uses the pool's."""
        self._library.lms_pager_keep(max(nbytes, 0), int(fill))

    def expect(self, course: Sequence[Iterable[Block]]) -> None:
        """Foresee that a step uses these blocks, in this order."""
        uses = [(piece, at) for at, blocks in enumerate(course) for block in blocks for piece in block.pieces]
        pieces = (ctypes.c_uint32 * len(uses))(*(piece for piece, _ in uses))
        positions = (ctypes.c_uint32 * len(uses))(*(at for _, at in uses))
        self._library.lms_pager_expect(pieces, positions, len(uses))

    def go_to(self, position: int) -> None:
        """The step is at this position of the course."""
        self._library.lms_pager_reach(position)

    def usage(self) -> PagerUsage:
        """Figures of this process's life, for any thread."""
        return self._usage(anew=False)

    def check(self) -> None:
        """Raises SpillError if a write failed since the last call."""
        usage = self._usage(anew=True)
        if usage.failed:
            raise SpillError(
                f"spill_dir={str(self._engine.file.directory)!r}: writing failed: {os.strerror(usage.failed)}; "
                f"{format_size(usage.resident)} of state stay in memory. Free some room there, or give another folder"
            )

    def _usage(self, *, anew: bool) -> PagerUsage:
        figures = (ctypes.c_uint64 * len(PagerUsage._fields))()  # of this call: threads may ask at once
        self._library.lms_pager_usage(figures, int(anew))
        return PagerUsage(*figures)

    def stop(self) -> None:
        """Nothing leaves any more. What is away comes back when it is touched."""
        self._library.lms_pager_stop()
        del self._file


@contextmanager
def _reading(library: ctypes.CDLL) -> Generator[None, None, None]:
    library.lms_pager_let_read(1)
    try:
        yield
    finally:
        library.lms_pager_let_read(0)


def _stay_first(library: ctypes.CDLL) -> None:
    """Have handlers of SIGSEGV that Python code sets stand behind the pager's.

    Lightning sets all signals back to what they were as its trainer ends. What is away is used after that, too.
    """
    for module, name in ((signal, "signal"), (faulthandler, "enable"), (faulthandler, "disable")):
        plain = getattr(module, name)
        if not hasattr(plain, "behind_pager"):
            setattr(module, name, _behind_pager(plain, library, steps_aside=module is faulthandler))


def _behind_pager(plain: Callable[..., Any], library: ctypes.CDLL, *, steps_aside: bool) -> Callable[..., Any]:
    @functools.wraps(plain)
    def behind(*args: Any, **kwargs: Any) -> Any:
        if steps_aside:  # faulthandler calls the handler that it found: not ours, which calls faulthandler's
            library.lms_pager_leave_faults()
        try:
            return plain(*args, **kwargs)
        finally:
            library.lms_pager_take_faults()

    behind.behind_pager = True  # type: ignore[attr-defined]
    return behind
