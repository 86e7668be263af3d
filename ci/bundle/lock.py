"""One run at a time on a folder; a second one waits, and then finds the work done."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from bundle.progress import say


@contextmanager
def held(folder: Path, *, shared: bool = False) -> Generator[None]:
    """Holds the lock of `folder`, which is made where it is missing. Ends with the process, however that ends.

    Any number may hold it `shared`, to read; one alone holds it to write.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / ".lock"
    with path.open("a+") as file:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            say(f"another run (process {file.read().strip() or 'unknown'}) works in {folder}: waiting for it")
            fcntl.flock(file, kind)
        if not shared:
            file.seek(0)
            file.truncate()
            file.write(str(os.getpid()))
            file.flush()
        try:
            yield
        finally:
            if not shared:  # who comes after readers, which write nothing, is not to name this process
                file.seek(0)
                file.truncate()
