"""MPI's files that stay behind if mpirun is killed, and how the next run knows that they are unused.

Open MPI keeps a file of 16 MiB a rank in /dev/shm and a folder in /tmp. Nothing removes them if mpirun is killed with
SIGKILL, or together with ddlrun. So on ddlrun's host each run gives Open MPI a folder for both: in /dev/shm, or,
if that is full or cannot be written, among the temporary files. ddlrun and the guard hold a shared lock on that folder,
and the kernel releases it when they end, in whatever way. A process that gets an exclusive lock on the folder may
remove it.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ddl.launch.guard import FOLDER

MEMORY = Path("/dev/shm")
BYTES_OF_RANK = 16 << 20
MARKER = ".ddlrun"  # this file marks a folder as ours: its name alone is no proof


def places() -> tuple[Path, ...]:
    """Where the folders may be, best first."""
    return MEMORY, Path(tempfile.gettempdir())


def base(ranks: int) -> Path:
    """The parent of a new folder: the first place that has room for the files of so many ranks, else the last one."""
    needed = ranks * BYTES_OF_RANK
    return next((one for one in places() if os.access(one, os.W_OK | os.X_OK) and _room(one) >= needed), places()[-1])


def _room(place: Path) -> int:
    found = os.statvfs(place)  # as Open MPI, which refuses a tmpfs without a limit, too: 0 bytes
    return found.f_bavail * found.f_frsize


def held(folder: Path, *, alone: bool = False) -> int | None:
    """Lock a folder; returns a descriptor, or None if it is locked, missing or another user's."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(descriptor).st_uid == os.geteuid():
            fcntl.flock(descriptor, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            # The folder may have been removed between the two calls.
            if os.path.samestat(os.fstat(descriptor), os.stat(folder, follow_symlinks=False)):
                return descriptor
    except OSError:
        pass
    os.close(descriptor)
    return None


@contextmanager
def folder(ranks: int = 1) -> Iterator[Path | None]:
    """Yields a new folder for the files of `ranks`, or None if none can be made.

    First removes the folders of runs that were killed. If a process of the job still holds it at the end, the next run
    removes it.
    """
    for one in places():
        clear(one)
    made = base(ranks) / f"ddlrun-{os.geteuid()}-{secrets.token_hex(8)}"  # no "pe": see folders.py
    if (lock := _make(made)) is None:
        yield None
        return
    try:
        yield made
    finally:
        os.close(lock)
        _remove(made)


def _make(made: Path) -> int | None:
    """Make the folder and its marker; returns a lock on it, or None if that fails, and then leaves nothing behind."""
    try:
        made.mkdir(mode=0o700)
    except OSError:
        return None
    lock = held(made)
    with suppress(OSError):
        if lock is not None:
            (made / MARKER).touch()  # only now, because no other run removes a folder without it
            return lock
    if lock is not None:
        os.close(lock)
    with suppress(OSError):
        made.rmdir()
    return None


def clear(where: Path) -> None:
    """Remove the folders that earlier runs of this user made and that no process holds."""
    name = re.compile(rf"ddlrun-{os.geteuid()}-[0-9a-f]{{16}}")
    with suppress(OSError):
        for one in list(where.iterdir()):
            if name.fullmatch(one.name) and (one / MARKER).is_file():
                _remove(one)


def _remove(one: Path) -> None:
    if (lock := held(one, alone=True)) is not None:
        shutil.rmtree(one, ignore_errors=True)
        os.close(lock)


_TEMPORARY = ("PRTE_MCA_prte_local_tmpdir_base", "OMPI_MCA_orte_local_tmpdir_base")  # of Open MPI 5 and 4


def variables(made: Path | None, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables by which mpirun uses the folder, unless the user named another; `redirection` is for the ranks."""
    if made is None:
        return {}
    return {FOLDER: str(made)} | {name: str(made) for name in _TEMPORARY if not environ.get(name)}


def redirection(kind: str) -> str:
    """A piece of sh with which a rank on ddlrun's host puts its shared memory there; "" for hydra.

    It unsets mpirun's own variables: Open MPI 4 would find that they contradict what it tells its ranks.
    """
    transports = {"openmpi5": "sm", "openmpi4": "vader"}
    if kind not in transports:
        return ""
    name = f"OMPI_MCA_btl_{transports[kind]}_backing_directory"
    gone = " ".join((FOLDER, *_TEMPORARY))
    return f'_d=${FOLDER}; unset {gone}; [ ! -d "$_d" ] || export {name}="${{{name}:-$_d}}"; '
