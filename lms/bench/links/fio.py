"""fio, on the file that LMS's own copies use."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

HUGE = 2 << 20  # bytes of a huge page on x86-64, and on arm64 with 4 KiB pages


class FioError(RuntimeError):
    """fio is not there, or failed: the message says what it said."""


def version() -> str:
    """Fio's version. Raises FioError when it is not installed."""
    if shutil.which("fio") is None:
        raise FioError("fio is not installed: ci/install_tools fio (Debian: package fio)")
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True).stdout.strip()


@contextmanager
def huge_pages(nbytes: int) -> Iterator[str | None]:
    """Huge pages for so many bytes, reserved by the kernel: None where it did so, else the reason why not."""
    setting = Path("/proc/sys/vm/nr_hugepages")
    try:
        before = setting.read_text()
        wanted = int(before) + -(-nbytes // HUGE) + 2
        setting.write_text(str(wanted))
    except OSError as error:
        yield f"huge pages cannot be reserved here: {error.strerror}"
        return
    try:
        found = int(setting.read_text())
        yield None if found >= wanted else f"{found} of {wanted} huge pages could be reserved"
    finally:
        setting.write_text(before)


def rate(file: Path, nbytes: int, block: int, way: Literal["read", "write"], *, huge: bool) -> float:
    """Bytes a second of one run over the first `nbytes` of `file`, in blocks of `block`. Raises FioError.

    `huge`: its memory lies in huge pages that are reserved.
    """
    command = [
        "fio", "--name=turn", f"--filename={file}", f"--rw={way}", f"--bs={block}", f"--size={nbytes}",
        "--ioengine=psync", "--direct=1", "--iodepth=1", "--numjobs=1", "--thread", "--refill_buffers=0",
        "--overwrite=1", "--allow_file_create=0", "--output-format=json", *(["--iomem=shmhuge"] if huge else []),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise FioError(f"fio ended with {done.returncode}: {done.stderr.strip() or done.stdout.strip()}")
    # Warnings may stand before the document.
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    moved, milliseconds = int(job[way]["io_bytes"]), float(job[way]["runtime"])
    if moved != nbytes or milliseconds <= 0:
        raise FioError(f"fio moved {moved} of {nbytes} bytes in {milliseconds} ms")
    return float(job[way]["bw_bytes"])
