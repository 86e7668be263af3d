"""A disk that the kernel throttles: a loop device over a file in memory, and a blkio cgroup for its users."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path


class ThrottleError(RuntimeError):
    """This machine does not permit it: the message says what, and what would."""


def refused() -> str | None:
    """None if a disk can be throttled here; else the reason why not."""
    if os.geteuid() != 0:
        return "a loop device and a cgroup of one's own take root"
    for tool in ("losetup", "mkfs.ext4", "mount"):
        if shutil.which(tool, path=_path()) is None:
            return f"{tool} is not installed (Debian: packages mount and e2fsprogs)"
    if _parent() is None:
        return "there is neither a blkio cgroup of version 1 nor an io controller of version 2 that may be used here"
    return None


@contextmanager
def disk(nbytes: int, memory: Path = Path("/dev/shm")) -> Iterator[tuple[Path, str]]:
    """A file system on a loop device over a file in `memory`: its folder, and the device's MAJOR:MINOR."""
    with ExitStack() as stack:
        descriptor, image = tempfile.mkstemp(dir=memory, prefix="lms-bench-", suffix=".img")
        stack.callback(os.unlink, image)
        os.truncate(descriptor, nbytes)
        os.close(descriptor)
        # Every block is there before anything is timed: the first touch of a page of tmpfs costs as much as the copy.
        with open(image, "r+b", buffering=0) as file:
            for _ in range(nbytes >> 20):
                file.write(bytes(1 << 20))
        loop = _run("losetup", "--find", "--show", image).strip()
        stack.callback(_run, "losetup", "--detach", loop)
        _run("mkfs.ext4", "-q", "-F", "-E", "nodiscard", loop)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lms-bench-")))
        _run("mount", loop, str(folder))
        stack.callback(_run, "umount", str(folder))
        yield folder, Path(f"/sys/block/{Path(loop).name}/dev").read_text().strip()


@contextmanager
def throttled(number: str, rate: float | None) -> Iterator[list[str]]:
    """The beginning of a command line whose process may move `rate` bytes a second each way; None: any."""
    if rate is None:
        yield []
        return
    parent = _parent()
    if parent is None:
        raise ThrottleError(refused() or "no cgroup")
    version, folder = parent
    group = folder / f"lms-bench-{os.getpid()}"
    group.mkdir()
    try:
        if version == 1:
            for way in ("read", "write"):
                (group / f"blkio.throttle.{way}_bps_device").write_text(f"{number} {int(rate)}")
        else:
            (group / "io.max").write_text(f"{number} rbps={int(rate)} wbps={int(rate)}")
        yield ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs")]
    finally:
        group.rmdir()


def _parent() -> tuple[int, Path] | None:
    """The folder in which a cgroup that throttles can be made, and its version."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(maxsplit=2)
        point = Path(left.split()[4])
        if kind == "cgroup" and "blkio" in options.split(",") and os.access(point, os.W_OK):
            return 1, point
        if kind == "cgroup2":
            controllers = point / "cgroup.subtree_control"
            if controllers.exists() and "io" in controllers.read_text().split() and os.access(point, os.W_OK):
                return 2, point
    return None


def _run(*command: str) -> str:
    environment = {**os.environ, "PATH": _path()}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise ThrottleError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _path() -> str:
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


def wrapped(prefix: Sequence[str], command: Sequence[str]) -> list[str]:
    """The command behind its beginning."""
    return [*prefix, *command]
