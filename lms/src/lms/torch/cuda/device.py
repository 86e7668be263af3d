"""A GPU's memory and its clock."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

import torch

from lms.memory.device import Device, Mark, Peak, check_limit


class CudaDevice(Device):
    """The bytes that PyTorch's allocator has given out on one GPU, and those that are reserved for what is paged."""

    def __init__(self, device: torch.device) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self.name = torch.cuda.get_device_name(self._device)
        self.reserved = None

    def capacity(self) -> int:
        """The GPU's memory."""
        return int(torch.cuda.get_device_properties(self._device).total_memory)

    def current(self) -> int:
        """Allocated and reserved bytes."""
        return self._allocated("current")

    def peak(self) -> Peak:
        """Most allocated bytes since `reset_peak`, and the reserved ones; not those that the allocator only caches."""
        peak = self._allocated("peak")
        return Peak(peak, peak)

    def reset_peak(self) -> None:
        """Let `peak` begin anew."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def measure_anew(self) -> None:
        """Also give back what the allocator caches: managed memory cannot take its place."""
        torch.cuda.empty_cache()
        self.reset_peak()

    def mark(self) -> Mark:
        """An event on the stream that is current in this thread."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def reached(self, mark: Mark) -> bool:
        """Whether the event was reached."""
        return bool(cast("torch.cuda.Event", mark).query())

    def elapsed(self, marks: Sequence[Mark]) -> list[float]:
        """Seconds between neighbouring marks; blocks until all are reached."""
        events = cast("Sequence[torch.cuda.Event]", marks)
        for event in events:  # they may lie on several streams, so the last one's end is not everyone's
            event.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]

    def prepare(self, limit: int | None) -> str | None:
        """Check the limit. There is nothing to set."""
        check_limit(limit, self.capacity(), f"{self.name} has", "its memory")
        return None

    def release(self) -> None:
        """Nothing was set."""

    def _allocated(self, which: str) -> int:
        # memory_allocated reads this too, but first sorts a flat dictionary of a hundred figures.
        figures = torch.cuda.memory_stats_as_nested_dict(self._device)
        allocated = int(figures["allocated_bytes"]["all"][which]) if figures else 0
        return allocated + (self.reserved or 0)
