"""fio, on the file that LMS's own copies use."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
from pathlib import Path
from typing import Literal

HUGE = 2 << 20  # bytes of a huge page on x86-64, and on arm64 with 4 KiB pages
_RESERVED = Path("/proc/sys/vm/nr_hugepages")


class FioError(RuntimeError):
    """fio is not there, or failed: the message says what it said."""


def version() -> str:
    """Fio's version. Raises FioError when it is not installed."""
    if shutil.which("fio") is None:
        raise FioError("fio is not installed: ci/install_tools fio (Debian: package fio)")
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()


class SharedMemory:
    """Memory that this process and fio can map, `nbytes` in all, in huge pages if the kernel reserves them.

    On a virtual machine a copy's speed depends on where its pages lie: contestants that each have their own are not
    compared, their pages are.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self.paths: list[Path] = []  # of the parts, for other processes, in the order in which they were asked for
        self._descriptors: list[int] = []
        self._before: str | None = None
        self.huge = False  # once it is entered: whether the kernel has reserved huge pages

    def __enter__(self) -> SharedMemory:
        self.huge = self._reserve(self._nbytes)
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        if self._before is not None:
            _RESERVED.write_text(self._before)

    def part(self, nbytes: int) -> mmap.mmap:
        """So many of them, zeros."""
        descriptor = os.memfd_create("bench-links", os.MFD_CLOEXEC | (os.MFD_HUGETLB if self.huge else 0))
        self._descriptors.append(descriptor)
        os.ftruncate(descriptor, -(-nbytes // HUGE) * HUGE)
        self.paths.append(Path(f"/proc/{os.getpid()}/fd/{descriptor}"))
        return mmap.mmap(descriptor, nbytes)

    def _reserve(self, nbytes: int) -> bool:
        """Whether the kernel has reserved huge pages for so many bytes, in two parts."""
        try:
            self._before = _RESERVED.read_text()
            wanted = int(self._before) + nbytes // HUGE + 2
            _RESERVED.write_text(str(wanted))
            return int(_RESERVED.read_text()) >= wanted
        except OSError:
            return False


def rate(file: Path, nbytes: int, block: int, way: Literal["read", "write"], memory: Path | None = None) -> float:
    """Bytes a second of one run over the first `nbytes` of `file`, in blocks of `block`. Raises FioError.

    `memory`: a part of SharedMemory to copy from and to, in place of fio's own. It then writes what lies there, without
    touching it between two blocks (scramble_buffers), as we do.
    """
    command = [
        "fio", "--name=turn", f"--filename={file}", f"--rw={way}", f"--bs={block}", f"--size={nbytes}",
        "--ioengine=psync", "--direct=1", "--iodepth=1", "--numjobs=1", "--thread", "--refill_buffers=0",
        "--overwrite=1", "--allow_file_create=0", "--output-format=json",
    ]  # fmt: skip
    if memory is not None:
        command += [f"--iomem=mmapshared:{memory}", "--scramble_buffers=0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise FioError(f"fio ended with {done.returncode}: {done.stderr.strip() or done.stdout.strip()}")
    # Warnings may stand before the document.
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    moved, milliseconds = int(job[way]["io_bytes"]), float(job[way]["runtime"])
    if moved != nbytes or milliseconds <= 0:
        raise FioError(f"fio moved {moved} of {nbytes} bytes in {milliseconds} ms")
    return float(job[way]["bw_bytes"])
