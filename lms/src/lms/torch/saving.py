"""`torch.save` of tensors that may be away: a system call does not wait for their pages, a copy in memory does."""

from __future__ import annotations

import functools
import io
import os
from typing import Any, BinaryIO

import torch

_AT_ONCE = 1 << 20  # bytes
_ours: Any = None


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
    """Have `torch.save` write copies from now on: tensors may be away after a session, too."""
    global _ours
    plain: Any = torch.save
    if plain is _ours:
        return

    @functools.wraps(plain)
    def save(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(f, str | os.PathLike):
            with open(f, "wb") as file:
                plain(obj, _Copies(file), *args, **kwargs)
        elif hasattr(f, "fileno") and not isinstance(f, io.BytesIO):
            plain(obj, _Copies(f), *args, **kwargs)
        else:
            plain(obj, f, *args, **kwargs)

    _ours = torch.save = torch.serialization.save = save
