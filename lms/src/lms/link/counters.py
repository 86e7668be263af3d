"""The machine's own counters of a link while a training uses it: the driver's bytes, not ours.

On a GPU they are NVML's field values of the link to its host; on a CPU device the kernel's of the disk below the file
tier, together with the process's memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Protocol

from lms.errors import LMSError
from lms.link import nvml
from lms.link.gpu import Gpu
from lms.link.nvml import FI_NVLINK_RX, FI_NVLINK_TX, FI_PCIE_RX, FI_PCIE_TX, Field, Nvml
from lms.memory.disk import disk_of
from lms.memory.resident import ResidentSet

_SECTOR = 512  # bytes, of the kernel's block statistics, whatever the disk's own sectors are


@dataclass(frozen=True)
class Reading:
    """Counters at one moment. None is what no source reports."""

    out: int | None = None  # bytes from the device to the tier below, since some beginning
    back: int | None = None  # bytes from there to the device
    memory: int | None = None  # bytes in use: of the GPU, or resident in this process
    busy: float | None = None  # share of the time in which the GPU computed, or the disk had something to do


class Counters(Protocol):
    """Something that counts."""

    what: str  # whose bytes they are, in words
    wraps: int  # the counters may begin anew at this number of bytes
    most: float  # bytes a second that the link could carry each way; 0 if that is not known

    def read(self) -> Reading:
        """The counters now. Raises LMSError when they are gone."""

    def close(self) -> None:
        """Let go of them. Idempotent."""


class DiskCounters:
    """The kernel's counts of the disk that `folder` lies on, from all processes, and this process's memory.

    Raises LMSError if no block device lies below.
    """

    wraps = 1 << 64
    most = 0.0

    def __init__(self, folder: Path, root: Path = Path("/")) -> None:
        disk = disk_of(folder, root)
        if not disk.number:
            raise LMSError(f"{disk.what()} has no counters: there is no block device below {str(folder)!r}")
        self.what = f"all that was read from and written to {disk.device}, by this process and others"
        self._stat = os.open(root / "sys/dev/block" / disk.number / "stat", os.O_RDONLY | os.O_CLOEXEC)
        self._resident = ResidentSet()
        self._last = (0.0, 0)  # when it was read, and the milliseconds that the disk had been busy by then

    def read(self) -> Reading:
        """Reads are the way back, writes the way out (the kernel's Documentation/block/stat.rst)."""
        fields = os.pread(self._stat, 512, 0).split()
        (before, spent), self._last = self._last, (time.perf_counter(), int(fields[9]))
        took = self._last[0] - before
        busy = min(1.0, (self._last[1] - spent) / 1e3 / took) if before and took > 0 else None
        return Reading(int(fields[6]) * _SECTOR, int(fields[2]) * _SECTOR, self._resident.current(), busy)

    def close(self) -> None:
        """Close the files."""
        self._resident.close()
        if "_stat" in self.__dict__:
            os.close(self.__dict__.pop("_stat"))


class NvmlCounters:
    """NVML's counts of the link between the GPU of that UUID and its host: NVLinks to the processor, or PCIe.

    `library` is pynvml, or a test's replacement. Raises LMSError if NVML or the GPU is missing.
    """

    def __init__(self, uuid: str, library: ModuleType | None = None) -> None:
        self._nvml = Nvml(library)
        self._closed = False
        try:
            self._handle, found = self._find(uuid.removeprefix("GPU-").lower())
        except BaseException:
            self._nvml.close()
            raise
        bricks = found.to("cpu")
        self._unit = 1 << 10 if bricks else 1
        self._out: list[Field] = [(FI_NVLINK_TX, brick.index) for brick in bricks] or [(FI_PCIE_TX, 0)]
        self._back: list[Field] = [(FI_NVLINK_RX, brick.index) for brick in bricks] or [(FI_PCIE_RX, 0)]
        if found.c2c is not None and found.c2c.up:  # whose bytes no field counts
            self._out = self._back = []
        # PCIe's counter has 32 bits (nvml.h does not say so; an H100's was seen to), NVLink's counts KiB in 64.
        self.wraps = (1 << 64) if bricks else (1 << 32)
        way, ceiling = found.host()
        self.most = ceiling.out if ceiling is not None else 0.0
        self.what = f"all that went over {way} of {found.name}, by this process and others"

    def _find(self, uuid: str) -> tuple[object, Gpu]:
        count = self._nvml.count()
        if not uuid and count != 1:
            raise LMSError(f"PyTorch does not tell which of the {count} GPUs it uses: its counters are not shown")
        lost: nvml.GpuLost | None = None
        for index in range(count):
            try:
                handle = self._nvml.handle(index)
                theirs = str(self._nvml.ask("nvmlDeviceGetUUID", handle) or "").removeprefix("GPU-").lower()
            except nvml.GpuLost as error:  # another one's fault, if the GPU is found
                lost = error
                continue
            if not uuid or theirs == uuid:
                return handle, nvml.gpu(self._nvml, index, handle)
        raise lost or LMSError(f"NVML knows of no GPU {uuid!r}: its counters are not shown")

    def read(self) -> Reading:
        """The counters now. Raises GpuLost when the GPU has fallen off the bus."""
        values = self._nvml.fields(self._handle, [*self._out, *self._back]) if self._out else []
        memory = self._nvml.ask("nvmlDeviceGetMemoryInfo", self._handle)
        rates = self._nvml.ask("nvmlDeviceGetUtilizationRates", self._handle)
        return Reading(
            self._sum(values[: len(self._out)]),
            self._sum(values[len(self._out) :]),
            None if memory is None else int(memory.used),  # type: ignore[attr-defined]
            None if rates is None else float(rates.gpu) / 100,  # type: ignore[attr-defined]
        )

    def close(self) -> None:
        """Let NVML go."""
        if not self._closed:
            self._closed = True
            self._nvml.close()

    def _sum(self, values: Sequence[int | None]) -> int | None:
        known = [value for value in values if value is not None]
        return sum(known) * self._unit if known and len(known) == len(values) else None
