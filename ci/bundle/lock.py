"""One run at a time on a folder; a second one waits, and then finds the work done."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from bundle.progress import say


@contextmanager
def held(folder: Path, *, shared: bool = False, name: str = ".lock") -> Generator[None]:
    """Holds the lock of `folder`, which is made where it is missing. Ends with the process, however that ends.

    Any number may hold it `shared`, to read; one alone holds it to write. The lock is the file `name` below the folder;
    who holds it to write may remove it, with the folder or without.
    """
    with _locked(folder, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, name) as file:
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


def _locked(folder: Path, kind: int, name: str) -> TextIO:
    """The open file of the lock, once it is ours."""
    path = folder / name
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # it was removed between two steps, by who held the lock: begin again
            file = path.open("a+")
            try:
                _wait(file, kind, folder)
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    return file
            except BaseException:
                file.close()
                raise
            file.close()


def _wait(file: TextIO, kind: int, folder: Path) -> None:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        say(f"another run (process {file.read().strip() or 'unknown'}) works in {folder}: waiting for it")
        fcntl.flock(file, kind)
