"""One run at a time on a folder; a second one waits, and then finds the work done."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from bundle.progress import say


@contextmanager
def held(folder: Path) -> Generator[None]:
    """Holds the lock of `folder`, which is made where it is missing. Ends with the process, however that ends."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".lock"
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            say(f"another run (process {file.read().strip() or 'unknown'}) works in {folder}: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        file.truncate()
        file.write(str(os.getpid()))
        file.flush()
        yield
