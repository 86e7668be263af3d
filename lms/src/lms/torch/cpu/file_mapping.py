"""Storages whose memory is a file's: checkpoints that safetensors or `torch.load(mmap=True)` has read."""

from __future__ import annotations

import ctypes

import torch

from lms.torch.cpu import page_pool

_SLICE = torch.UntypedStorage(2)[:1]


def is_private_mapping(storage: torch.UntypedStorage) -> bool:
    """Whether the memory is mapped from a file, and writes to it do not reach the file. False without the page pool."""
    pool = page_pool.find()
    if pool is None:
        return False
    check = pool.library.lms_is_private_mapping
    return bool(check(ctypes.c_void_p(storage._cdata), ctypes.c_void_p(_SLICE._cdata)))


def drop_pages(storage: torch.UntypedStorage) -> None:
    """Give back the memory of such a storage. It has the file's bytes again."""
    pool = page_pool.find()
    assert pool is not None
    pool.library.lms_drop_mapped_pages(ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes()))
