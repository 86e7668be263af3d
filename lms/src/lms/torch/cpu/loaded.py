"""Storages that a checkpoint was loaded into. PyTorch forbids to resize them, as it does if NumPy refers to the memory.

Without the page pool both answers are False.
"""

from __future__ import annotations

import ctypes

import torch

from lms.torch.cpu import page_pool

_SLICE = torch.UntypedStorage(2)[:1]


def is_mapped(storage: torch.UntypedStorage) -> bool:
    """Whether the memory is mapped from a file, and writes to it do not reach the file."""
    pool = page_pool.find()
    slot, known = ctypes.c_void_p(storage._cdata), ctypes.c_void_p(_SLICE._cdata)
    return pool is not None and bool(pool.library.lms_is_mapped(slot, known))


def is_read(storage: torch.UntypedStorage) -> bool:
    """Whether `torch.load` read a file into it: the memory is PyTorch's own."""
    pool = page_pool.find()
    return pool is not None and bool(pool.library.lms_is_read(ctypes.c_void_p(storage._cdata)))


def drop_pages(storage: torch.UntypedStorage) -> None:
    """Give back the pages of a mapped storage that nobody has written to."""
    pool = page_pool.find()
    assert pool is not None
    pool.library.lms_drop_mapped_pages(ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes()))
