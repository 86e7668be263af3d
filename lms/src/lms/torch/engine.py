"""Engines: they move a device's bytes to the tier below and back, as tensors."""

from __future__ import annotations

import os
from typing import Protocol

import torch

from lms.core.link import Link
from lms.memory.slots import Slot
from lms.memory.transfer import Copy
from lms.torch.cuda.streams import Stream

_PIECE = 32 << 20  # bytes of one calibration copy, at most


class Engine(Protocol):
    """Moves flat byte tensors off the device and back. Called under one lock; copies may be waited for outside it."""

    name: str  # the tier in words: "file in /var/tmp", "host"
    device: torch.device

    def offload(self, source: torch.Tensor) -> tuple[Slot, Copy]:
        """Start the copy out of `source` (uint8, one dimension, contiguous, on the device).

        The engine keeps `source` alive until the copy is over. On CUDA `source` must come from the current stream's
        pool, or its owner must have ordered that pool behind the current stream. Raises SpillError when the tier takes
        no more.
        """

    def reload(self, slot: Slot) -> tuple[torch.Tensor, Copy]:
        """A uint8 tensor of `slot.nbytes` on the device, and the copy that fills it.

        It starts at the same distance from a page's (on CUDA: the allocator's) boundary as the tensor that left.
        """

    def discard(self, slot: Slot) -> None:
        """Free the slot when its copies are over. Never blocks; idempotent; may come from any thread."""

    def usage(self) -> dict[str, int]:
        """Bytes below the device: `host` and `host_peak`, `file` and `file_peak`, as far as there is such a tier."""

    def link(self) -> Link | None:
        """Bandwidth and latency of the copies so far; None before any."""

    def stalled(self) -> tuple[float, float]:
        """Seconds that the computation has stood still for copies out, and for copies back, as far as known by now."""

    def trim(self) -> None:
        """Give back memory below the device that was not needed since the last call. For now and then between steps."""
        return None

    def close(self) -> None:
        """Wait for the copies and give everything back. Idempotent; does nothing in a forked child."""

    def stream(self) -> Stream | None:
        """The stream that computes for this thread; None on a device that has none."""
        return None

    def capturing(self) -> bool:
        """Whether what this thread computes is captured in a CUDA graph, and not run."""
        return False

    def calibrate(self, nbytes: int, piece: int = _PIECE) -> Link:
        """Copy `nbytes` out and back, `piece` bytes at a time, and measure. The device holds twice that meanwhile.

        The bytes are noise, since a disk may spare itself zeros; from the system, since the framework's generators are
        the user's.
        """
        nbytes = max(nbytes, 1)
        piece = min(nbytes, piece, _PIECE)
        grain = torch.frombuffer(bytearray(os.urandom(min(piece, 1 << 20))), dtype=torch.uint8)
        source = grain.repeat(-(-piece // len(grain)))[:piece].to(self.device)
        slots = []
        try:
            for begin in range(0, nbytes, piece):
                slot, copy = self.offload(source[: nbytes - begin])
                slots.append(slot)
                copy.synchronize()
            for slot in slots:
                tensor, copy = self.reload(slot)
                copy.synchronize()
                del tensor, copy
        finally:
            for slot in slots:
                self.discard(slot)
        link = self.link()
        assert link is not None
        return link
