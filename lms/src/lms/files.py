"""Output files: written whole or not at all, through links, and in place if they are devices or FIFOs."""

from __future__ import annotations

import os
import secrets
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lms.errors import LMSError, UsageError
from lms.ranks import own_file, rank_of


def write_aside(path: Path, content: bytes) -> None:
    """Put `content` at `path`, as `aside` does. The file that stdout or stderr goes to is written through these.

    Raises OSError as the file system does; nothing is left behind then.
    """
    status = _status(path)
    if (stream := _stream(status)) is not None:
        for output in (sys.stdout, sys.stderr):
            if output is not None:
                output.flush()
        _write_all(stream, content)
        return
    with aside(path) as part:
        part.write_bytes(content)


@contextmanager
def aside(path: Path) -> Iterator[Path]:
    """Yield the path of an empty file beside `path`, and rename it to `path` after the body. No reader sees a part.

    It is on the disk before it is renamed, so that the old file or the new one is there after a power failure. It has
    the mode of the old file; if there is none, the umask's. A link stays a link, and its target is written. A device
    or a FIFO is yielded itself, and a FIFO waits for its reader. If the body or the file system raises, the old file
    stays and nothing is left behind.
    """
    status = _status(path)
    if _is_special(status):
        yield path
        return
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.parent / f".{path.name[:50]}.{secrets.token_hex(8)}"
    with part.open("xb") as file:
        mode = stat.S_IMODE((status or os.fstat(file.fileno())).st_mode)
        os.fchmod(file.fileno(), mode | stat.S_IRUSR | stat.S_IWUSR)  # private ones while they are written, too
    try:
        yield part
        with part.open("rb") as file:  # the body may have put another file there
            os.fsync(file.fileno())
        part.chmod(mode)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def check_output(option: str, path: Path | None) -> None:
    """Refuse what `write_output` could not write, before anything is run for it. Opens nothing.

    Raises UsageError that names `option`.
    """
    if path is None:
        return
    try:
        path = _own(path)
        status = _status(path)
    except OSError as error:
        raise UsageError(f"{option}={str(path)!r}: {error.strerror}; expected the path of a file") from None
    kind = "" if status is None else _REFUSED.get(stat.S_IFMT(status.st_mode), "")
    if kind and _stream(status) is None:
        raise UsageError(f"{option}={str(path)!r}: {kind}; expected the path of a file")
    if _is_special(status):
        if not os.access(path, os.W_OK):
            raise UsageError(f"{option}={str(path)!r}: this user may not write to it; expected a file elsewhere")
        return
    above = next(folder for folder in Path(os.path.realpath(path)).parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise UsageError(f"{option}={str(path)!r}: {str(above)!r} cannot be written to; expected a file elsewhere")


def write_output(option: str, path: Path, content: bytes) -> Path:
    """Write this rank's file for `option` and return its path. Makes missing folders.

    Rank 0 writes to `path`, each other rank to a name with its number; a device or a FIFO is all ranks'.

    Raises LMSError that names `option` when the file system refuses.
    """
    try:
        path = _own(path)
        write_aside(path, content)
    except OSError as error:
        raise LMSError(f"{option}={str(path)!r}: not written: {error.strerror}") from None
    return path


def tell(text: str, *files: tuple[str, Path | None, Callable[[], bytes]]) -> int:
    """Print `text`, then write each option's file, also if nobody reads what is printed; the exit status.

    A letter that the terminal's encoding does not have becomes a question mark.
    """
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "replace").decode(encoding), flush=True)
    finally:
        for option, path, content in files:
            if path is not None:
                write_output(option, path, content())
    return 0


# A block device would lose the file system that is on it, and a socket cannot be opened.
_REFUSED = {stat.S_IFDIR: "a folder", stat.S_IFBLK: "a block device", stat.S_IFSOCK: "a socket"}


def _own(path: Path) -> Path:
    """Where this rank writes. Raises OSError."""
    return path if _is_special(_status(path)) else own_file(path, rank_of(os.environ))


def _is_special(status: os.stat_result | None) -> bool:
    """Whether it is there and neither a regular file nor a folder: a device, a FIFO, a socket."""
    return status is not None and not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode)


def _status(path: Path) -> os.stat_result | None:
    """What `path` leads to; None if nothing is there yet. Raises OSError for a path that cannot be followed."""
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None
    except NotADirectoryError:  # the folder above is a file, and said to be one later
        return None


def _stream(status: os.stat_result | None) -> int | None:
    """The descriptor if it is what stdout or stderr goes to: a file that is renamed over it would lose what they say.

    A socket is not opened again by its name.
    """
    if status is None:
        return None
    for descriptor in (1, 2):
        try:
            if os.path.samestat(os.fstat(descriptor), status):
                return descriptor
        except OSError:  # it is closed
            continue
    return None


def _write_all(descriptor: int, content: bytes) -> None:
    while content:
        content = content[os.write(descriptor, content) :]
