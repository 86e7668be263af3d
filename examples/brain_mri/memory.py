"""How much memory training holds: the allocator's bytes on a GPU, the process's resident set on a CPU (Linux).

LMS has a reader of the resident set of its own, which is not used here: plain training needs no LMS to be installed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_PAGE = os.sysconf("SC_PAGE_SIZE")


class Memory:
    """Bytes held now, and the most held since `reset`. Knows nothing of LMS: plain runs are measured with it too."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.resets = True  # False: the kernel refuses a reset, and `peak` is that of the process's whole life
        self.mapped_peak = 0  # most bytes of private writable mappings that were sampled: what RLIMIT_DATA counts

    def current(self) -> int:
        """Bytes held now."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        with open("/proc/self/statm", "rb") as file:
            pages = file.read().split()
        self.mapped_peak = max(self.mapped_peak, int(pages[5]) * _PAGE)
        return int(pages[1]) * _PAGE

    def peak(self) -> int:
        """Most bytes held since the last `reset`."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))

    def reset(self) -> None:
        """Start counting `peak` anew."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        try:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
        except OSError:
            self.resets = False

    @contextmanager
    def sampled(
        self, in_use: Callable[[], int] | None = None, interval: float = 0.005
    ) -> Iterator[list[tuple[float, int]]]:
        """A list that fills, while the block runs, with (time.perf_counter() in seconds, bytes in use).

        `in_use` knows what of the bytes held is only kept for reuse; without it all that is held is in use.
        """
        samples: list[tuple[float, int]] = []
        over = threading.Event()

        def read() -> None:
            held = self.current()
            samples.append((time.perf_counter(), held if in_use is None else in_use()))

        def sample() -> None:
            while not over.wait(interval):
                read()

        thread = threading.Thread(target=sample, daemon=True)
        read()
        thread.start()
        try:
            yield samples
        finally:
            over.set()
            thread.join()
            read()
