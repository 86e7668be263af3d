"""Files written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from lms.errors import UsageError


def write_aside(path: Path, content: bytes) -> None:
    """Put `content` at `path`: written beside it, then renamed, so that no reader ever sees a part.

    Raises OSError as the file system does; nothing is left behind then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.chmod(aside, 0o644)
        os.replace(aside, path)
    except BaseException:
        os.unlink(aside)
        raise


def check_output(option: str, path: Path | None) -> None:
    """Refuse a file that cannot be written, before anything is run for it. Missing folders are made when it is.

    Raises UsageError that names `option`.
    """
    if path is None:
        return
    if path.is_dir():
        raise UsageError(f"{option}={str(path)!r}: a folder; expected the path of a file")
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise UsageError(f"{option}={str(path)!r}: {str(above)!r} cannot be written to; expected a file elsewhere")
