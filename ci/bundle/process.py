"""What this process shares with others: its end, its lock on a folder, what it says."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import sys
from collections.abc import Generator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import NoReturn

from tqdm import tqdm

_PR_SET_PDEATHSIG = 1  # of prctl(2)


def say(text: str) -> None:
    """A line to the person at the command line."""
    tqdm.write(f"bundle: {text}", file=sys.stderr)


def bar(what: str, total: int, unit: str) -> tqdm[NoReturn]:
    """A progress bar, if somebody watches."""
    return tqdm(
        total=total, desc=what, unit=unit, unit_scale=unit == "B", leave=False, file=sys.stderr,
        disable=not sys.stderr.isatty(),
    )  # fmt: skip


@contextmanager
def locked(folder: Path) -> Generator[None]:
    """One run at a time on `folder`, which is made if it is missing; a second one waits. Ends with the process."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            say(f"another run (process {file.read().strip() or 'unknown'}) works in {folder}: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def pool(processes: int) -> ProcessPoolExecutor:
    """Processes that end when this one does. Spawned, and not forked: rattler has threads."""
    return ProcessPoolExecutor(max(1, processes), get_context("spawn"), _end_with, (os.getpid(),))


def _end_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was killed before
        os._exit(1)


def leave(status: int) -> NoReturn:
    """End the process at once: now and then a thread of py-rattler aborts it while the interpreter goes down."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
