"""The pool of pages that PyTorch's CPU tensors come from: `lms/native` in C++, here its Python side.

`python -m lms.build torch` compiles it. Without it LMS has malloc return each freed tensor to the system, which keeps
the same limit and costs a page fault for every 4 KB of the next one.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

LEAST = 64 << 10  # bytes; smaller blocks are not the pool's (kLeast in torch_allocator.cc)
_UNBOUNDED = 2**64 - 1


class PoolUsage(NamedTuple):
    """A page pool in figures: bytes, and how many blocks were stitched."""

    used: int
    used_peak: int
    idle: int
    peak: int
    fresh: int
    returned: int
    stitched: int
    paged: int


class PagePool:
    """PyTorch's CPU allocator, once `install` was called. There is one a process."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        library.lms_pool_keep.argtypes = (ctypes.c_size_t,)
        library.lms_pool_usage.argtypes = (ctypes.POINTER(ctypes.c_uint64),)
        self._figures = (ctypes.c_uint64 * len(PoolUsage._fields))()

    @property
    def installed(self) -> bool:
        """Whether new tensors come from the pool. A forked child's do not, until it calls `install` itself."""
        return bool(self.library.lms_pool_active())

    def install(self) -> bool:
        """Let new tensors come from the pool; False if another allocator will not give way."""
        return bool(self.library.lms_pool_install() == 0)

    def retire(self) -> None:
        """Let new tensors come from PyTorch's own allocator again, and return what is idle. Tensors live on."""
        self.library.lms_pool_retire()

    def keep(self, nbytes: int) -> None:
        """Keep idle pages only while used and idle ones together are at most `nbytes`; return the rest."""
        self.library.lms_pool_keep(min(max(nbytes, 0), _UNBOUNDED))

    def reset_peak(self) -> None:
        """Let `used_peak` and `peak` begin anew."""
        self.library.lms_pool_reset_peak()

    def usage(self) -> PoolUsage:
        """Where the pool's pages are."""
        self.library.lms_pool_usage(self._figures)
        return PoolUsage(*self._figures)
