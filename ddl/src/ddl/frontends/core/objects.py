"""Python objects sent from one rank to all, or from all to all, as bytes in NumPy arrays."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TypeVar

import numpy as np

ObjectT = TypeVar("ObjectT")


def broadcast(
    obj: ObjectT, is_root: bool, name: str | None, copy_from_root: Callable[[np.ndarray, str | None], None]
) -> ObjectT:
    """The root's object, on every rank. It can be anything that can be pickled.

    `copy_from_root(array, name)` copies the root's array to all ranks, and returns when that is done.
    """
    content = _pickled(obj) if is_root else np.empty(0, np.uint8)
    length = np.array([len(content)])
    copy_from_root(length, _part(name, "length"))
    if not is_root:
        content = np.empty(int(length[0]), np.uint8)
    copy_from_root(content, _part(name, "content"))
    if is_root:
        return obj
    received: ObjectT = pickle.loads(content.tobytes())
    return received


def allgather(
    obj: ObjectT, name: str | None, gathered: Callable[[np.ndarray, str | None], np.ndarray]
) -> list[ObjectT]:
    """The objects of all ranks, in order. `gathered(array, name)` returns the arrays of all ranks, joined."""
    content = _pickled(obj)
    ends = np.cumsum(gathered(np.array([len(content)]), _part(name, "length")))
    every = gathered(content, _part(name, "content"))
    return [pickle.loads(part.tobytes()) for part in np.split(every, ends[:-1])]


def _part(name: str | None, part: str) -> str | None:
    return None if name is None else f"{name} (an object's {part})"


def _pickled(obj: object) -> np.ndarray:
    return np.frombuffer(bytearray(pickle.dumps(obj)), np.uint8)
