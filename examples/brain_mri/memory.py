"""How much memory training holds: the allocator's bytes on a GPU, the process's resident set on a CPU (Linux)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from lms.memory.resident import ResidentSet


class Memory:
    """Bytes held now, and the most held since `reset`. Plain runs are measured with it as those under LMS are."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._resident = ResidentSet()
        self.resets = True  # False: the kernel refuses a reset, and `peak` is that of the process's whole life
        self.mapped_peak = 0  # most bytes of private writable mappings that were sampled: what RLIMIT_DATA counts

    def current(self) -> int:
        """Bytes held now."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        self.mapped_peak = max(self.mapped_peak, self._resident.mapped())
        return self._resident.current()

    def peak(self) -> int:
        """Most bytes held since the last `reset`."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return self._resident.peak()

    def reset(self) -> None:
        """Start counting `peak` anew."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        try:
            self._resident.reset_peak()
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
