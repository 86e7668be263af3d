"""`torch.save` of tensors that may be away: a system call does not wait for their pages, a copy in memory does."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def _copies(target: Any) -> Iterator[Any]:
    """A file that copies for `target`, a path or a file; `target` itself if it makes no system calls."""
    if isinstance(target, str | os.PathLike):
        with open(target, "wb") as file:
            yield _Copies(file)
    elif hasattr(target, "fileno") and not isinstance(target, io.BytesIO):
        yield _Copies(target)
    else:
        yield target


def let_save_wait() -> None:
    """Have `torch.save` write copies from now on: tensors may be away after a session, too.

    It opens its file by one of two functions. A script may have imported `save` itself before.
    """
    serialization: Any = torch.serialization
    zipped, plain = serialization._open_zipfile_writer, serialization._open_file_like
    if hasattr(zipped, "writes_copies"):
        return

    @contextmanager
    def open_zipfile_writer(name_or_buffer: Any) -> Iterator[Any]:
        with _copies(name_or_buffer) as file, zipped(file) as opened:
            yield opened

    @contextmanager
    def open_file_like(name_or_buffer: Any, mode: str) -> Iterator[Any]:
        if "r" in mode:
            with plain(name_or_buffer, mode) as opened:
                yield opened
        else:
            with _copies(name_or_buffer) as file, plain(file, mode) as opened:
                yield opened

    open_zipfile_writer.writes_copies = True  # type: ignore[attr-defined]
    serialization._open_zipfile_writer, serialization._open_file_like = open_zipfile_writer, open_file_like
