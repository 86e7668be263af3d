"""The allocators that plain training is measured over, beside the C library's as it comes.

LMS's tensors on a CPU come from its page pool. Plain over the same pool, and over jemalloc, tell what of a ratio is
the allocator's and what is swapping's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes.util import find_library
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lms.memory.page_pool import PagePool

POOL, JEMALLOC = "pool", "jemalloc"

# It keeps what is freed, as the page pool does. By default it gives it back within 10 s, and pays for each page again.
_KEEP = "dirty_decay_ms:-1,muzzy_decay_ms:-1"


def refused(device: str) -> dict[str, str]:
    """The allocators that no cell can be over here, each with the reason."""
    if device != "cpu":
        return dict.fromkeys((POOL, JEMALLOC), f"tensors on {device} come from PyTorch's own allocator")
    why = {}
    if _pool() is None:
        why[POOL] = "the page pool is not compiled for this PyTorch (python -m lms.build torch)"
    if find_library(JEMALLOC) is None:
        why[JEMALLOC] = "libjemalloc is not installed (Debian: libjemalloc2)"
    return why


def environment(kind: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that a cell's process over this allocator starts with, beside those of `environ`."""
    if kind != JEMALLOC:
        return {}
    preloaded = [str(find_library(JEMALLOC)), *filter(None, [environ.get("LD_PRELOAD")])]
    return {"LD_PRELOAD": ":".join(preloaded), "MALLOC_CONF": _KEEP}


def enter(kind: str) -> None:
    """Have this process's tensors come from it. Raises RuntimeError if they do not."""
    if kind == POOL:
        pool = _pool()
        if pool is None or not pool.install():
            raise RuntimeError("tensors do not come from the page pool")
    elif kind == JEMALLOC:
        library, decay = ctypes.CDLL(None), ctypes.c_ssize_t()
        size = ctypes.c_size_t(ctypes.sizeof(decay))
        asked = (b"opt.dirty_decay_ms", ctypes.byref(decay), ctypes.byref(size), None, 0)
        if not hasattr(library, "mallctl") or library.mallctl(*asked) or decay.value != -1:
            raise RuntimeError(f"memory does not come from jemalloc with {_KEEP}")


def _pool() -> PagePool | None:
    from lms.torch.cpu.page_pool import find

    return find()
