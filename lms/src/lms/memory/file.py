"""The file tier: one slab file that has no name, written and read past the page cache.

The file is unlinked as soon as it is open, so a killed process leaves nothing; it has mode 0600, because what a model
saved for its backward pass is training data. The tier works on addresses and knows no framework.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import tempfile
import warnings
import zlib
from itertools import pairwise
from pathlib import Path

from lms.errors import CorruptionError, SpillError, remedy
from lms.memory.slab import ALIGNMENT, Slab, round_up
from lms.units import format_size

_HUGE = 2 << 20  # bytes of a huge page on x86-64 and arm64 with 4 KiB pages
_PIECE = 4 << 20  # bytes that are copied before they are written
_UNBOUNDED = 1 << 62  # the file system says when a file is full, the slab never does
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


_WRITABLE = 0x200  # PyBUF_WRITE of Python's C interface
_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view.restype = ctypes.py_object


class Place:
    """Where one run of bytes lies in the file.

    `skew` is how far into a page the bytes began in memory. The file holds them at the same distance from a block's
    start, so whole pages go out straight from memory, whatever the address, and come back to memory that has
    the address's low bits again: no staging, and no other alignment for the operation that uses them.
    """

    __slots__ = ("checksum", "nbytes", "offset", "skew")

    def __init__(self, offset: int, nbytes: int, skew: int) -> None:
        self.offset, self.nbytes, self.skew = offset, nbytes, skew
        self.checksum: int | None = None

    @property
    def span(self) -> int:
        """Bytes from the first page's start to the last page's end."""
        return round_up(max(self.skew + self.nbytes, 1))


def page_memory(nbytes: int) -> mmap.mmap:
    """`nbytes` of fresh private memory that starts on a page; it goes back to the system when the object dies.

    Uses huge pages for as much as whole ones cover: the kernel fills them in a third of the processor's time. The ends
    stay small pages, so that no huge page is shared with a neighbouring mapping, and no byte is resident beside it.

    Raises SpillError when the system has no room for it.
    """
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise SpillError(
            f"host memory: {format_size(nbytes)} were asked for, and the system refused ({error.strerror}); free some, "
            "lift what bounds this process (ulimit -v, vm.overcommit_memory), or, if a great many tensors are "
            "swapped, raise vm.max_map_count or min_size"
        ) from error
    start = -address_of(memory) % _HUGE
    length = (nbytes - start) // _HUGE * _HUGE
    if length > 0:
        with contextlib.suppress(OSError, AttributeError):  # a kernel without them does it the slower way
            memory.madvise(mmap.MADV_HUGEPAGE, start, length)
    return memory


def address_of(memory: mmap.mmap) -> int:
    """The address of a mapping's first byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def bytes_at(address: int, nbytes: int) -> memoryview:
    """The memory at an address. Nothing keeps it there."""
    view: memoryview = _view(address, nbytes, _WRITABLE)
    return view


class FileSlab:
    """A slab file in `directory`. `direct` says whether it goes past the page cache.

    `verify` keeps a checksum of all that is written and compares it with what is read. `allocate` and `free` are not
    thread-safe; `write` and `read` may run in two threads on different places.

    Raises SpillError when no file can be made there.
    """

    def __init__(self, directory: Path, *, verify: bool = False) -> None:
        self.directory = directory
        self.verify = verify
        self.slab = Slab(_UNBOUNDED)
        try:
            self._fd = _open_unlinked(directory)
        except OSError as error:
            raise SpillError(
                f"spill_dir={str(directory)!r}: no file can be made there ({error.strerror}); "
                + remedy(error, "give a folder on a local disk that this user may write to")
            ) from error
        self.direct = self._switch_to_direct()
        if not self.direct:
            warnings.warn(
                f"spill_dir={str(directory)!r}: its file system refuses O_DIRECT, so copies go through the page cache: "
                "they cost more of the processor, and what is cached counts against a memory cap; "
                "a folder on a local disk (ext4, xfs) avoids it",
                RuntimeWarning,
                stacklevel=2,
            )

    def fileno(self) -> int:
        """The slab file's descriptor. Raises ValueError after close."""
        if self._fd < 0:
            raise ValueError("the slab file is closed")
        return self._fd

    def allocate(self, nbytes: int, skew: int) -> Place:
        """Room for `nbytes` that begin `skew` bytes into a page. Whether the disk has it shows in the write."""
        place = Place(0, nbytes, skew)
        offset = self.slab.allocate(place.span)
        if offset is None:
            raise SpillError(f"spill_dir={str(self.directory)!r}: no file holds {format_size(nbytes)} more")
        place.offset = offset
        return place

    def free(self, place: Place) -> None:
        """Give the room back to later writes. The file keeps its length until it is closed."""
        self.slab.free(place.offset)

    def write(self, place: Place, address: int) -> None:
        """Write the place's bytes from `address`, which must be `skew` into a page.

        Raises SpillError that names the folder, what was asked and what is free.
        """
        if not place.nbytes:
            return
        pages = _pages(address, place.nbytes)
        if not self.verify:
            self._write(place, pages, place.offset)
            return
        # Write copies: a change during the write must not look like a broken disk.
        checksum, done = 0, 0
        for page in pages:
            for start in range(0, len(page), _PIECE):
                piece = _copied(page[start : start + _PIECE])
                begin = place.skew - done
                checksum = zlib.crc32(piece[max(begin, 0) : max(begin + place.nbytes, 0)], checksum)
                self._write(place, [piece], place.offset + done)
                done += len(piece)
        place.checksum = checksum

    def _write(self, place: Place, left: list[memoryview], offset: int) -> None:
        while left:
            try:
                written = os.pwritev(self.fileno(), left, offset)
            except OSError as error:
                if error.errno != errno.EFAULT:
                    raise self._refused(place, error.errno) from None
                # A pager has taken pages away (of a gradient of which a gradient is asked). A memory access brings them
                # back; a system call fails.
                left = [_copied(left[0][:_PIECE]), left[0][_PIECE:], *left[1:]]
                continue
            if not written:
                raise self._refused(place, errno.EIO)
            offset += written
            left = _after(left, written)

    def read(self, place: Place, address: int) -> None:
        """Read the place's whole pages to `address`, the start of a page; the bytes begin `skew` behind it.

        Raises CorruptionError when bytes are missing or, with `verify`, not those that were written; SpillError when
        the file system refuses.
        """
        if not place.nbytes:
            return
        pages, done = bytes_at(address, place.span), 0
        while done < place.span:
            try:
                got = os.preadv(self.fileno(), [pages[done:]], place.offset + done)
            except OSError as error:
                raise SpillError(
                    f"spill_dir={str(self.directory)!r}: reading {format_size(place.nbytes)} back failed: "
                    f"{error.strerror}; check the disk"
                ) from None
            if self.direct:
                got -= got % ALIGNMENT  # a part of a block is the file's end; O_DIRECT could not go on from there
            if not got:
                raise CorruptionError(
                    f"spill_dir={str(self.directory)!r}: a short read, {done} of {place.span} bytes at "
                    f"{place.offset}: the slab file was cut; nothing else may touch it"
                )
            done += got
        content = pages[place.skew : place.skew + place.nbytes]
        if place.checksum is not None and place.checksum != zlib.crc32(content):
            raise CorruptionError(
                f"spill_dir={str(self.directory)!r}: {format_size(place.nbytes)} at {place.offset} came back other "
                "than they were written; check the disk and the memory"
            )

    def close(self) -> None:
        """Close the file, which frees its room on the disk. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _switch_to_direct(self) -> bool:
        """Turn O_DIRECT on and write one block: some file systems take the flag and refuse the write."""
        try:
            flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        except (OSError, AttributeError):
            return False
        with page_memory(ALIGNMENT) as block:
            try:
                os.pwritev(self._fd, [block], 0)
            except OSError as error:
                if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                    fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
                    return False
                # Any other error is for the first real write to name.
        return True

    def _refused(self, place: Place, code: int | None) -> SpillError:
        why = os.strerror(code or errno.EIO)
        asked = f"spill_dir={str(self.directory)!r}: writing {format_size(place.nbytes)} failed: {why}"
        if code not in _FULL:
            return SpillError(f"{asked}; check the disk, or give another folder")
        state = os.fstatvfs(self.fileno())
        free = format_size(state.f_bavail * state.f_frsize)
        return SpillError(
            f"{asked}; {free} are free there, and LMS holds {format_size(self.slab.used)} in it; "
            "free some room, give a folder on a larger disk, or raise the limit so that less is swapped"
        )


def _open_unlinked(directory: Path) -> int:
    """A new file of mode 0600 without a name. Raises OSError."""
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except (OSError, AttributeError):  # not every file system has nameless files
        fd, name = tempfile.mkstemp(prefix=".lms-slab-", dir=directory)
        os.unlink(name)
        return fd


def _pages(address: int, nbytes: int) -> list[memoryview]:
    """The whole pages that hold `nbytes` at `address`.

    Pages that belong to the bytes alone are written in place. A page at either end that is shared with
    other memory goes out as a copy, padded with zeros: the neighbours' bytes are no business of this file, and they
    may change during the write, which a file system with checksums would take for a broken block.
    """
    stop = address + nbytes
    first = min(round_up(address), stop)
    last = max(stop // ALIGNMENT * ALIGNMENT, first)
    pages = []
    for begin, end in pairwise(sorted({address, first, last, stop})):
        part = bytes_at(begin, end - begin)
        if begin % ALIGNMENT or end % ALIGNMENT:
            page = memoryview(page_memory(ALIGNMENT))
            page[begin % ALIGNMENT :][: len(part)] = part
            part = page
        pages.append(part)
    return pages


def _copied(pages: memoryview) -> memoryview:
    copy = memoryview(page_memory(len(pages)))
    copy[:] = pages
    return copy


def _after(parts: list[memoryview], done: int) -> list[memoryview]:
    """What is left of `parts` when their first `done` bytes are done."""
    left = []
    for part in parts:
        if done < len(part):
            left.append(part[done:])
        done = max(0, done - len(part))
    return left
