"""`torch.save` of tensors that may be away: a system call does not wait for their pages, a copy in memory does."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, BinaryIO

import torch

_AT_ONCE = 1 << 20  # bytes


class _Copies:
    """A file that copies what it is given before it writes it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.flush = file.flush

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _AT_ONCE):
            self._file.write(bytes(view[start : start + _AT_ONCE]))
        return len(view)


def let_save_wait() -> None:
    """Have `torch.save` write copies from now on: tensors may be away after a session, too.

    It opens its file by one of two functions. A script may have imported `save` itself before.
    """
    for name in ("_open_zipfile_writer", "_open_file_like"):
        plain = getattr(torch.serialization, name)
        if not hasattr(plain, "writes_copies"):
            setattr(torch.serialization, name, _writes_copies(plain))


def _writes_copies(plain: Callable[..., Any]) -> Callable[..., Any]:
    @contextmanager
    def copying(file: BinaryIO, *mode: str) -> Iterator[Any]:
        with plain(_Copies(file), *mode) as opened:
            yield opened

    @contextmanager
    def opening(path: str, *mode: str) -> Iterator[Any]:
        with open(path, "wb") as file, copying(file, *mode) as opened:
            yield opened

    @wraps(plain)
    def open_file(target: Any, *mode: str) -> Any:
        if mode == ("rb",):
            return plain(target, *mode)
        if isinstance(target, str | os.PathLike):
            return opening(os.fspath(target), *mode)
        if hasattr(target, "fileno") and not isinstance(target, io.BytesIO):
            return copying(target, *mode)
        return plain(target, *mode)

    open_file.writes_copies = True  # type: ignore[attr-defined]
    return open_file
