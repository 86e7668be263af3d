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
from pathlib import Path

from lms.errors import CorruptionError, SpillError, remedy
from lms.memory.slab import ALIGNMENT, Slab, round_up
from lms.units import format_size

_HUGE = 2 << 20  # bytes of a huge page on x86-64 and arm64 with 4 KiB pages
_UNBOUNDED = 1 << 62  # the file system says when a file is full, the slab never does
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _Segment(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))  # struct iovec


# By address and not by buffer: no object to build for each copy, and ctypes releases the interpreter's lock too.
_libc = ctypes.CDLL(None, use_errno=True)
_pwritev, _pread = _libc.pwritev, _libc.pread
_pwritev.argtypes = (ctypes.c_int, ctypes.POINTER(_Segment), ctypes.c_int, ctypes.c_long)
_pread.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_long)
_pwritev.restype = _pread.restype = ctypes.c_ssize_t


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
        if self.verify:
            place.checksum = _checksum(address, place.nbytes)
        segments, keep = _segments(address, place.nbytes)
        offset, left = place.offset, segments
        while left:
            vector = (_Segment * len(left))(*(_Segment(*segment) for segment in left))
            written = _pwritev(self.fileno(), vector, len(left), offset)
            if written <= 0:
                code = ctypes.get_errno()
                if written < 0 and code == errno.EINTR:
                    continue
                raise self._refused(place, code if written < 0 else errno.EIO)
            offset += written
            left = _after(left, written)
        del keep  # the blocks at the ends live until here

    def read(self, place: Place, address: int) -> None:
        """Read the place's whole pages to `address`, the start of a page; the bytes begin `skew` behind it.

        Raises CorruptionError when bytes are missing or, with `verify`, not those that were written; SpillError when
        the file system refuses.
        """
        done, span = 0, place.span if place.nbytes else 0
        while done < span:
            got = _pread(self.fileno(), address + done, span - done, place.offset + done)
            if got >= 0 and self.direct:
                got -= got % ALIGNMENT  # a part of a block is the file's end; O_DIRECT could not go on from there
            if got == 0:
                raise CorruptionError(
                    f"spill_dir={str(self.directory)!r}: a short read, {done} of {span} bytes at {place.offset}: "
                    "the slab file was cut; nothing else may touch it"
                )
            if got < 0:
                code = ctypes.get_errno()
                if code == errno.EINTR:
                    continue
                raise SpillError(
                    f"spill_dir={str(self.directory)!r}: reading {format_size(place.nbytes)} back failed: "
                    f"{os.strerror(code)}; check the disk"
                )
            done += got
        if place.checksum is not None and _checksum(address + place.skew, place.nbytes) != place.checksum:
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
            vector = (_Segment * 1)(_Segment(address_of(block), ALIGNMENT))
            written = _pwritev(self._fd, vector, 1, 0)
            del vector
        if written < 0 and ctypes.get_errno() in (errno.EINVAL, errno.EOPNOTSUPP):
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
            return False
        return True  # any other error is for the first real write to name

    def _refused(self, place: Place, code: int) -> SpillError:
        asked = f"spill_dir={str(self.directory)!r}: writing {format_size(place.nbytes)} failed: {os.strerror(code)}"
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


def _segments(address: int, nbytes: int) -> tuple[list[tuple[int, int]], list[mmap.mmap]]:
    """The whole pages that hold `nbytes` at `address`, as (address, length), and the blocks that must outlive them.

    Pages that belong to the bytes alone are written in place. A page at either end that is shared with
    other memory goes out as a copy, padded with zeros: the neighbours' bytes are no business of this file, and they
    may change during the write, which a file system with checksums would take for a broken block.
    """
    start, stop = address, address + nbytes
    first, last = round_up(start), stop // ALIGNMENT * ALIGNMENT
    if first > last:  # all within one page
        block = _copy_of(start, nbytes, start % ALIGNMENT)
        return [(address_of(block), ALIGNMENT)], [block]
    segments: list[tuple[int, int]] = []
    keep: list[mmap.mmap] = []
    if start < first:
        keep.append(_copy_of(start, first - start, start % ALIGNMENT))
        segments.append((address_of(keep[-1]), ALIGNMENT))
    if first < last:
        segments.append((first, last - first))
    if last < stop:
        keep.append(_copy_of(last, stop - last, 0))
        segments.append((address_of(keep[-1]), ALIGNMENT))
    return segments, keep


def _copy_of(address: int, nbytes: int, at: int) -> mmap.mmap:
    block = page_memory(ALIGNMENT)
    ctypes.memmove(address_of(block) + at, address, nbytes)
    return block


def _after(segments: list[tuple[int, int]], written: int) -> list[tuple[int, int]]:
    """The rest of `segments` when their first `written` bytes are done."""
    left = []
    for address, nbytes in segments:
        done = min(written, nbytes)
        written -= done
        if done < nbytes:
            left.append((address + done, nbytes - done))
    return left


def _checksum(address: int, nbytes: int) -> int:
    return zlib.crc32((ctypes.c_char * nbytes).from_address(address))
