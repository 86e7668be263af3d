"""The device: the memory that `limit` bounds, and the clock of the computation that uses it.

On a CPU it is the process's resident set, on a GPU what the allocator has given out.
"""

from __future__ import annotations

import ctypes
import os
import time
import warnings
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    import torch

Mark = object  # a point in the computation's time, as its device gave it: for `elapsed` and nothing else

_PAGE = os.sysconf("SC_PAGE_SIZE")
_M_MMAP_THRESHOLD = -3  # malloc.h
_THRESHOLD = 65536  # bytes; blocks from here on get a mapping of their own, which goes back when they are freed


class Device(Protocol):
    """What the session asks of the memory that it keeps under a limit."""

    name: str

    def capacity(self) -> int:
        """Bytes that the device has for this process."""

    def current(self) -> int:
        """Bytes in use now, LMS's and all others."""

    def peak(self) -> int:
        """Most bytes in use since `reset_peak`."""

    def reset_peak(self) -> None:
        """Let `peak` begin anew."""

    def mark(self) -> Mark:
        """Now, a point in the computation's time. Never blocks."""

    def elapsed(self, marks: Sequence[Mark]) -> list[float]:
        """Seconds between neighbouring marks, one less than there are marks. May block until the last is reached."""

    def prepare(self) -> str | None:
        """Set what makes freed memory leave the device; a warning for the user where that cannot be done."""


class CpuDevice:
    """The resident set of this process. A forked child's object tells of the child."""

    name = "cpu"

    def __init__(self) -> None:
        self._open()
        self._warned = False

    def _open(self) -> None:
        self._pid = os.getpid()
        self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self._status = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        for name in ("_statm", "_status"):
            if name in self.__dict__:
                os.close(self.__dict__.pop(name))

    def capacity(self) -> int:
        """The lesser of what the machine has and what the control group allows."""
        return memory_capacity()

    def current(self) -> int:
        """Resident bytes, exact to some pages a core (the kernel counts them by core)."""
        if "_statm" not in self.__dict__:
            return 0  # the collector closed it before whoever asks
        if os.getpid() != self._pid:  # the open files still tell of the parent
            self.__del__()
            self._open()
        return int(os.pread(self._statm, 128, 0).split(b" ", 2)[1]) * _PAGE

    def peak(self) -> int:
        """Most resident bytes since `reset_peak`, or of the process's life where the kernel refuses a reset."""
        if "_status" not in self.__dict__:
            return 0
        if os.getpid() != self._pid:
            self.__del__()
            self._open()
        text = os.pread(self._status, 4096, 0)
        at = text.find(b"VmHWM:")
        if at < 0:  # a kernel that does not count it: what is resident now is the best that is known
            return self.current()
        return int(text[at + 6 : text.index(b"kB", at)]) * 1024

    def reset_peak(self) -> None:
        """Let `peak` begin anew; where the kernel refuses, warn once and go on."""
        try:
            with open("/proc/self/clear_refs", "wb", buffering=0) as file:
                file.write(b"5")
        except OSError as error:
            if not self._warned:
                self._warned = True
                warnings.warn(
                    f"the kernel refuses to reset the peak of the resident set ({error.strerror}): "
                    "`peak` is that of the whole process's life",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def mark(self) -> Mark:
        """The clock's reading."""
        return time.perf_counter()

    def elapsed(self, marks: Sequence[Mark]) -> list[float]:
        """Seconds between neighbouring marks."""
        times = cast("Sequence[float]", marks)
        return [after - before for before, after in pairwise(times)]

    def prepare(self) -> str | None:
        """Have the C library return freed tensors to the system at once; the reason where it cannot be told to."""
        library = ctypes.CDLL(None)
        for symbol, name in (("mallctl", "jemalloc"), ("tc_version", "tcmalloc"), ("mi_version", "mimalloc")):
            if hasattr(library, symbol):
                return (
                    f"memory comes from {name}, which keeps freed tensors for a while: the resident set may stay above "
                    "the limit; start Python without it (LD_PRELOAD) to see the savings"
                )
        mallopt = getattr(library, "mallopt", None)
        if mallopt is None or not mallopt(_M_MMAP_THRESHOLD, _THRESHOLD):
            return (
                "the C library's malloc cannot be told to return freed tensors to the system: the resident set may "
                "stay above the limit"
            )
        return None


class CudaDevice:
    """What PyTorch's allocator has given out on one GPU."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._cuda = torch.cuda
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self.name = torch.cuda.get_device_name(self._device)

    def capacity(self) -> int:
        """The GPU's memory."""
        return int(self._cuda.get_device_properties(self._device).total_memory)

    def current(self) -> int:
        """Allocated bytes."""
        return self._allocated("current")

    def peak(self) -> int:
        """Most allocated bytes since `reset_peak`."""
        return self._allocated("peak")

    def reset_peak(self) -> None:
        """Let `peak` begin anew."""
        self._cuda.reset_peak_memory_stats(self._device)

    def mark(self) -> Mark:
        """An event on the stream that is current in this thread."""
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._device))
        return event

    def elapsed(self, marks: Sequence[Mark]) -> list[float]:
        """Seconds between neighbouring marks; blocks until all are reached."""
        events = cast("Sequence[torch.cuda.Event]", marks)
        for event in events:  # they may lie on several streams, so the last one's end is not everyone's
            event.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]

    def prepare(self) -> str | None:
        """Nothing is to be set."""
        return None

    def _allocated(self, which: str) -> int:
        # What memory_allocated reads, without the flat dictionary of a hundred figures that it sorts first.
        figures = self._cuda.memory_stats_as_nested_dict(self._device)
        return int(figures["allocated_bytes"]["all"][which]) if figures else 0


def memory_capacity(root: Path = Path("/")) -> int:
    """Bytes of memory that this process may use: the machine's, or less where a control group says so.

    `root` is where `proc` and the mount points are looked for; tests give a folder.
    """
    total = 0
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            total = int(line.split()[1]) * 1024
    limits = [limit for limit in _group_limits(root) if limit > 0]
    return min([total, *limits]) if total else min(limits)


def _group_limits(root: Path) -> list[int]:
    """The memory limits of this process's control group and of all groups above it, of versions 1 and 2."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return []
    paths: dict[str, str] = {}  # file in which a version keeps its limit -> this process's group
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths["memory.max"] = path
        elif "memory" in controllers.split(","):
            paths["memory.limit_in_bytes"] = path
    limits: list[int] = []
    for line in mounts:
        fields, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        name = {"cgroup2": "memory.max", "cgroup": "memory.limit_in_bytes"}.get(kind)
        if name not in paths or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        inner, point = (_unescape(field) for field in fields.split()[3:5])
        path = paths[name]
        # Inside a container the mount shows only a part of the tree, and the group's path may be told from outside it.
        below = path[len(inner.rstrip("/")) :] if (path + "/").startswith(inner.rstrip("/") + "/") else ""
        top = root / point.lstrip("/")
        group = top / below.strip("/")
        if ".." in group.parts:  # the process was moved out of its namespace's root
            group = top
        for folder in (group, *group.parents):
            text = _read(folder / name)
            if text.isdigit():  # "max" is none
                limits.append(int(text))
            if folder == top:
                break
    return limits


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _unescape(field: str) -> str:
    """A path of mountinfo, where space, tab, newline and backslash stand as octal numbers."""
    for code, letter in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, letter)
    return field
