"""Text files that a user names."""

from __future__ import annotations

import errno
import os
from pathlib import Path

MOST_BYTES = 16 << 20  # of a host file with a line for each of a million ranks; /dev/zero has no end


def read(path: Path) -> str:
    """The text of a file of at most MOST_BYTES. Raises OSError, of a larger file EFBIG, and UnicodeDecodeError."""
    with path.open("rb") as file:
        text = file.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return text.decode().replace("\r\n", "\n")
