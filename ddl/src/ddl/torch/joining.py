"""DDP's `join` for process groups in Python.

In each forward pass DDP counts the ranks that still train, and hands the work to its reducer, which asks it for the
number in the backward pass. But C++ keeps only the half of a work that is written in C++.
"""

from __future__ import annotations

import weakref
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Reducer, Work

_counts: weakref.WeakKeyDictionary[Reducer, Work] = weakref.WeakKeyDictionary()


def install() -> None:
    """Have each reducer's last work kept, whole. A second call does nothing."""
    reducer = import_module("torch._C._distributed_c10d").Reducer
    original = getattr(reducer, "_set_forward_pass_work_handle", None)
    if original is None or getattr(original, "is_of_ddl", False):
        return

    def keep(its: Reducer, work: Work, use_static_world_size: bool) -> None:
        original(its, work, use_static_world_size)
        _counts[its] = work

    keep.is_of_ddl = True  # type: ignore[attr-defined]
    reducer._set_forward_pass_work_handle = keep
