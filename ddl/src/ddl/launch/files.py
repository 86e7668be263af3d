"""Text files that a user names."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from ddl.launch.counts import quoted
from ddl.launch.errors import UsageError

MOST_BYTES = 16 << 20  # enough for a host file with a line for each of a million ranks; /dev/zero has no end


def read(path: Path) -> str:
    """The text of a file of at most MOST_BYTES. Raises OSError (EFBIG if it is larger) and UnicodeDecodeError."""
    with path.open("rb") as file:
        text = file.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return text.decode("utf-8-sig").replace("\r\n", "\n")


def named(path: Path, name: str, expected: str) -> str:
    """The text of a file that the option or variable `name` gives.

    Raises UsageError, which says what is `expected`.
    """
    try:
        return read(path)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"{name}={quoted(str(path))}: cannot be read: {why}; expected {expected}") from None
