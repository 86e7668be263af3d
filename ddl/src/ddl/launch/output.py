"""Output files, written whole or not at all. Links are followed; devices, FIFOs and stdout are written in place."""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from ddl.launch.counts import quoted

# A block device would lose the file system that is on it, and a socket cannot be opened.
_REFUSED = {stat.S_IFDIR: "is a folder", stat.S_IFBLK: "is a block device", stat.S_IFSOCK: "is a socket"}


def output_file(text: str) -> Path:
    """Check that `write` can write this file, whether it exists or not. Opens nothing.

    Raises ValueError, before anything is computed.
    """
    path = Path(text)
    if _own(path) is not None:
        return path
    try:
        mode = _mode(path)
    except OSError as error:
        raise ValueError(f"{quoted(text)}: {error.strerror}; name another file") from None
    if (kind := stat.S_IFMT(mode)) in _REFUSED:
        raise ValueError(f"{quoted(text)} {_REFUSED[kind]}; expected a file")
    folder = Path(os.path.realpath(path)).parent
    if not _is_special(mode) and not folder.is_dir():
        raise ValueError(f"{quoted(text)}: there is no folder {folder}; make it first, or name another file")
    if not os.access(path if _is_special(mode) else folder, os.W_OK):
        raise ValueError(f"{quoted(text)} cannot be written by this user; name another file")
    return path


def write(path: Path, content: bytes) -> None:
    """Write `content` to a file beside `path`, then rename it, so that no reader ever sees a part.

    A link stays a link, and its target is written. A device or a FIFO is written in place, and so is what stdout and
    stderr go to, by whatever name: what they have said stays. Raises OSError as the file system does; nothing is left
    behind then.
    """
    if (own := _own(path)) is not None:
        with suppress(BrokenPipeError), open(own, "wb", closefd=False) as file:  # as for console.show
            file.write(content)
        return
    if _is_special(_mode(path)):
        with open(path, "wb") as file:
            file.write(content)
        return
    path = Path(os.path.realpath(path))
    descriptor, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:50]}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.chmod(aside, 0o644)
        os.replace(aside, path)
    except BaseException:
        os.unlink(aside)
        raise


def _own(path: Path) -> int | None:
    """This process's stdout or stderr, if `path` leads to the same file: /dev/stdout does."""
    for descriptor in (1, 2):
        with suppress(OSError):
            if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                return descriptor
    return None


def _mode(path: Path) -> int:
    """The st_mode of the file that `path` leads to; 0 if there is none yet. Raises OSError if it cannot be followed."""
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):  # NotADirectoryError: output_file reports the missing folder
        return 0


def _is_special(mode: int) -> bool:
    """Whether there is something that is neither a regular file nor a folder."""
    return mode != 0 and not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)
