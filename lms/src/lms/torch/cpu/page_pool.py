"""The page pool that was compiled for this PyTorch, and tensors that start on a page of it."""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from lms.build import POOL, built
from lms.memory.file import page_memory
from lms.memory.page_pool import LEAST, PagePool
from lms.torch.cuda.streams import over


@cache
def find() -> PagePool | None:
    """The pool of this process; None when it was not compiled for this PyTorch, or cannot be loaded."""
    return built(torch.__version__, POOL, lambda path: PagePool(ctypes.CDLL(path)))


def pages(nbytes: int) -> torch.Tensor:
    """`nbytes` that start on a page: the pool's if it is in use, else the system's, which has them again at once."""
    pool = find()
    if pool is not None and pool.installed and nbytes >= LEAST:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    return over(page_memory(nbytes), 0, nbytes)
