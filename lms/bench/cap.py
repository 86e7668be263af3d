"""Run a command under a hard cap on its memory, to show what fits and what does not.

Three ways, the first that this machine permits: a cgroup v1 or v2 (`memory.limit_in_bytes`, `memory.max`), else the
resource limit RLIMIT_DATA. They count different things:

- A cgroup counts the pages that are really there: anonymous memory, tmpfs, kernel memory, and the page cache of files
  that the command read or wrote. Page cache is taken back before anything is killed, so buffered file I/O slows a
  command at its cap and does not kill it; O_DIRECT I/O leaves no page cache and is not counted. At the cap the kernel
  swaps, when the command was given swap, or kills.
- RLIMIT_DATA counts private writable mappings, touched or not: thread stacks (8 MB each), allocators' arenas, copies
  of file mappings that are writable. It is the stricter cap. The mapping over the limit is refused, which PyTorch
  reports as an allocation that failed; the kernel kills nothing. Shared mappings and files cost nothing.

Everything that is made for it (the cgroup, the swap file) is removed by a guard: a process that waits on a pipe from
us and cleans up when the pipe closes. It does so even when we are killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Literal

from lms.errors import LMSError, UsageError

Method = Literal["cgroup v1", "cgroup v2", "RLIMIT_DATA"]

_SWAP = 8 * 2**30  # bytes of a swap file; at most half of what is free beside it

# Messages on stderr after a refused allocation: Python's, C++'s, PyTorch's, libc's.
_REFUSED = ("MemoryError", "bad_alloc", "can't allocate memory", "Cannot allocate memory", "cannot allocate memory")

_GUARD = """
trap '' HUP INT TERM
read -r _
if [ -n "$1" ]; then
    tries=0
    while [ -d "$1" ] && [ $tries -lt 200 ]; do
        while read -r process; do kill -KILL "$process"; done < "$1/cgroup.procs"
        rmdir "$1" && break
        tries=$((tries + 1))
        sleep 0.05
    done
fi
if [ -n "$2" ]; then
    swapoff "$2"
    rm -f "$2"
fi
"""


@dataclass(frozen=True)
class CapResult:
    """How a command under a cap ended."""

    returncode: int  # as in subprocess: -9 if the kernel killed it
    killed: bool  # the cap ended it: the kernel's OOM killer, or (RLIMIT_DATA) an allocation that was refused
    stdout: str
    stderr: str
    timed_out: bool  # it was still running after `timeout` seconds, and we killed it


class Cap:
    """A cap that processes can be started under: a context manager; leaving it kills what still runs there.

    `limit_bytes` bounds all processes started with `command` together (RLIMIT_DATA: each). With a folder `swap` the
    kernel swaps at the cap, to a file that is made there and switched on. Without it the cap kills, whatever swap the
    machine has.

    Raises UsageError for a wrong limit, LMSError if swap was asked for and is not permitted (`can_swap` says why).
    """

    def __init__(self, limit_bytes: int, *, swap: Path | None = None, via: Method | None = None) -> None:
        if limit_bytes <= 0:
            raise UsageError(f"limit_bytes={limit_bytes}: expected a size of more than zero")
        if swap is not None and (reason := can_swap()):
            raise LMSError(f"swap={str(swap)!r}: a cap with swap was asked for, but {reason}")
        self.limit_bytes = limit_bytes
        self.method: Method = via or method()
        self._swap = swap
        self._swap_file: Path | None = None
        self._group: Path | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Cap:
        if self.method == "RLIMIT_DATA":
            return self
        parent = _parent(self.method)
        if parent is None:
            raise LMSError(f"this machine has no {self.method} any more that a cap could be made in")
        group = parent / f"lms-cap-{os.getpid()}-{os.urandom(4).hex()}"
        if self._swap is not None:
            descriptor, name = tempfile.mkstemp(dir=self._swap, prefix="lms-", suffix=".swap")
            os.close(descriptor)
            self._swap_file = Path(name)
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "lms-guard", str(group), str(self._swap_file or "")],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PATH": _path()},
            start_new_session=True,
        )
        try:
            if self._swap_file is not None:
                _swap_on(self._swap_file)
            group.mkdir()
            self._group = group
            self._set_limits(group)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def command(self, argv: Sequence[str]) -> list[str]:
        """The command line that runs `argv` under the cap: a shell that enters it, then becomes the command."""
        if self._group is None:
            return ["/bin/sh", "-c", 'ulimit -d "$0" && exec "$@"', str(max(1, self.limit_bytes // 1024)), *argv]
        return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self._group / "cgroup.procs"), *argv]

    def peak(self) -> int | None:
        """Most bytes that were counted so far; None if nothing counts them."""
        for name in ("memory.max_usage_in_bytes", "memory.peak"):
            if (text := self._read(name)) is not None:
                return int(text)
        return None

    def tighten(self, limit_bytes: int) -> None:
        """Lower the cap of what runs already. Raises OSError when so little cannot be reclaimed to."""
        if self._group is None or limit_bytes > self.limit_bytes:
            raise UsageError(f"limit_bytes={limit_bytes}: expected a cgroup's cap of {self.limit_bytes} or less")
        self.limit_bytes = limit_bytes
        self._set_limits(self._group)

    def kills(self) -> int:
        """How many processes the kernel has killed at the cap so far."""
        for name in ("memory.oom_control", "memory.events"):
            for line in (self._read(name) or "").splitlines():
                key, _, value = line.partition(" ")
                if key == "oom_kill":
                    return int(value)
        return 0

    def kill(self) -> None:
        """Kill every process that is in the cap's cgroup."""
        for process in (self._read("cgroup.procs") or "").split():
            try:
                os.kill(int(process), signal.SIGKILL)
            except ProcessLookupError:
                continue

    def close(self) -> None:
        """Kill what runs under the cap; remove the cgroup and the swap file. Idempotent."""
        guard, self._guard = self._guard, None
        if guard is not None:
            assert guard.stdin is not None
            guard.stdin.close()
            guard.wait()
        self._group = self._swap_file = None

    def _set_limits(self, group: Path) -> None:
        if self.method == "cgroup v1":
            (group / "memory.limit_in_bytes").write_text(str(self.limit_bytes))
            if self._swap_file is None:
                # Without swap accounting the first file is missing; then swappiness 0 keeps a v1 group from swapping.
                _write_where_present(group / "memory.memsw.limit_in_bytes", str(self.limit_bytes))
                (group / "memory.swappiness").write_text("0")
        else:
            (group / "memory.max").write_text(str(self.limit_bytes))
            _write_where_present(group / "memory.oom.group", "1")
            _write_where_present(group / "memory.swap.max", "0" if self._swap_file is None else "max")

    def _read(self, name: str) -> str | None:
        if self._group is None:
            return None
        try:
            return (self._group / name).read_text().strip()
        except OSError:
            return None


def run(
    argv: Sequence[str],
    *,
    limit_bytes: int,
    swap: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> CapResult:
    """Run `argv` under a cap of `limit_bytes` and wait for it, `timeout` seconds at most. `swap`: see Cap.

    Raises as Cap does, and OSError when the shell cannot be started. A command that cannot be found ends with 127.
    """
    with Cap(limit_bytes, swap=swap) as cap:
        process = subprocess.Popen(
            cap.command(argv),
            env=None if env is None else dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        timed_out = False
        try:
            try:
                stdout, stderr = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                timed_out = True
                _kill(process, cap)
                stdout, stderr = process.communicate()
        except BaseException:
            _kill(process, cap)
            process.wait()
            raise
        if cap.method == "RLIMIT_DATA":
            killed = process.returncode != 0 and any(words in stderr for words in _REFUSED)
        else:
            killed = cap.kills() > 0
        return CapResult(process.returncode, killed, stdout, stderr, timed_out)


@cache
def method() -> Method:
    """How this machine lets us cap a command: found once, by capping one that does nothing."""
    for candidate in ("cgroup v1", "cgroup v2"):
        if _parent(candidate) is None:
            continue
        try:
            with Cap(64 * 2**20, via=candidate) as cap:
                if subprocess.run(cap.command(["/bin/true"]), capture_output=True, check=False).returncode == 0:
                    return candidate
        except OSError:
            continue
    return "RLIMIT_DATA"


@cache
def can_swap() -> str | None:
    """None if a cap can make a command swap; else the reason why not."""
    if method() == "RLIMIT_DATA":
        return "this process may make no memory cgroup, and RLIMIT_DATA cannot make the kernel swap"
    if os.geteuid() != 0:
        return "switching swap on takes root"
    for tool in ("mkswap", "swapon", "swapoff"):
        if shutil.which(tool, path=_path()) is None:
            return f"{tool} is not installed (Debian: packages util-linux and mount)"
    return None


def _path() -> str:
    # mkswap and swapon live in sbin, which an ordinary PATH may leave out.
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


def _kill(process: subprocess.Popen[str], cap: Cap) -> None:
    cap.kill()
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()


def _parent(wanted: Method) -> Path | None:
    """The directory that a capped cgroup can be made in; None if there is none of that version."""
    try:
        mounts, own = Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text()
    except OSError:
        return None
    if wanted == "cgroup v1":
        return find_v1(mounts, own)
    candidates = find_v2(mounts, own)
    return next((directory for directory in candidates if _delegated(directory)), None)


def _delegated(directory: Path) -> bool:
    """Whether a child of this v2 cgroup has a memory limit and may be entered by us."""
    try:
        controllers = (directory / "cgroup.subtree_control").read_text().split()
    except OSError:
        return False
    return "memory" in controllers and os.access(directory, os.W_OK) and os.access(directory / "cgroup.procs", os.W_OK)


def find_v1(mountinfo: str, own: str) -> Path | None:
    """The v1 memory cgroup that this process is in, from the text of /proc/self/mountinfo and /proc/self/cgroup.

    A child of it keeps every limit above it in force.
    """
    for line in own.splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return next(iter(_mounted(mountinfo, "cgroup", "memory", path)), None)
    return None


def find_v2(mountinfo: str, own: str) -> list[Path]:
    """The v2 cgroup that this process is in and all above it up to the mount, nearest first.

    A v2 cgroup that holds processes cannot give its children controllers, so the cap goes beside us, into the nearest
    one above that already does.
    """
    for line in own.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            return _mounted(mountinfo, "cgroup2", "", path)
    return []


def _mounted(mountinfo: str, kind: str, option: str, path: str) -> list[Path]:
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        root, point = left.split()[3:5]
        found, _, options = right.split(maxsplit=2)
        if found != kind or (option and option not in options.split(",")):
            continue
        # In a container the mount may show a part of the tree only; what is outside cannot be reached.
        if not Path(path).is_relative_to(root):
            continue
        directory, top = Path(point) / Path(path).relative_to(root), Path(point)
        return [directory, *(above for above in directory.parents if above.is_relative_to(top))]
    return []


def _write_where_present(path: Path, text: str) -> None:
    if path.exists():
        path.write_text(text)


def _swap_on(file: Path) -> None:
    nbytes = min(_SWAP, shutil.disk_usage(file.parent).free // 2)
    nbytes -= nbytes % 2**20
    try:
        with file.open("r+b") as opened:
            os.posix_fallocate(opened.fileno(), 0, nbytes)
    except OSError as error:
        raise LMSError(f"swap={str(file)!r}: no room for a swap file of {nbytes} bytes: {error.strerror}") from None
    environment = {**os.environ, "PATH": _path()}
    for tool in ("mkswap", "swapon"):
        done = subprocess.run([tool, str(file)], env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise LMSError(f"swap={str(file)!r}: {tool} failed: {done.stderr.strip()}; try another file system")
