"""The folder of the file tier: the one that was given, or one that lies on a disk."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from lms.errors import UsageError
from lms.memory.disk import disk_of

_CHOOSE = "choose a folder on a disk (--spill-dir, LMS_SPILL_DIR, spill_dir=)"


def spill_folder(given: Path | None = None, among: Iterable[Path] | None = None) -> Path:
    """The folder to which a CPU device swaps: `given`, or the first of `among` that is on a disk and can be written to.

    `among` is by default the temporary folder, /var/tmp, the working directory and the home folder. A folder in memory
    (tmpfs, ramfs) would free nothing: what is swapped there counts against the same memory.

    Raises UsageError if `given` is in memory, and if none of `among` can be used.
    """
    if given is not None:
        if memory := _in_memory(given):
            raise UsageError(
                f"spill_dir={str(given)!r}: it is on {memory}: what is swapped there stays in the memory that it is to "
                f"leave; {_CHOOSE}{_such_as()}"
            )
        return given
    found: dict[Path, str] = {}  # folder -> why it was not taken
    for folder in _usual() if among is None else among:
        if not os.access(folder, os.W_OK | os.X_OK):
            found[folder] = "it cannot be written to" if folder.exists() else "it does not exist"
        elif memory := _in_memory(folder):
            found[folder] = f"it is on {memory}"
        else:
            return folder
    reasons = "; ".join(f"{folder}: {why}" for folder, why in found.items())
    raise UsageError(f"spill_dir: not given, and no usual folder is on a disk ({reasons}); {_CHOOSE}")


def _usual() -> Iterator[Path]:
    for find in (tempfile.gettempdir, lambda: "/var/tmp", Path.cwd, Path.home):
        with suppress(OSError, RuntimeError):  # no temporary folder can be used, the working directory is gone, no home
            yield Path(find())


def _in_memory(folder: Path) -> str:
    """The kind of memory that the folder lies in; "" if it is on a disk, or cannot be looked at."""
    try:
        disk = disk_of(folder)
    except OSError:
        return ""
    return disk.what() if disk.memory else ""


def _such_as() -> str:
    try:
        return f", such as {spill_folder()}"
    except UsageError:
        return ""
