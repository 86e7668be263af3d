"""The CPU engine: RAM to a file, and back into whole pages."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lms.link import Link
from lms.memory.file import FileSlab
from lms.memory.slab import ALIGNMENT
from lms.memory.slots import Slot
from lms.memory.transfer import At, Copy, FileEngine, FileSlot
from lms.torch.cpu.page_pool import pages
from lms.torch.cuda.streams import within
from lms.torch.engine import calibrate


class CpuEngine:
    """RAM to a slab file. Each tensor comes back into memory of its own, which is free again when it dies.

    `memory` gives it: so many bytes as a uint8 tensor that starts on a page.
    """

    def __init__(self, file: FileSlab, *, memory: Callable[[int], torch.Tensor] = pages) -> None:
        self.name = f"file in {file.directory}"
        self._files = FileEngine(file)
        self._memory = memory

    @property
    def file(self) -> FileSlab:
        """The slab file, for its state and its descriptor."""
        return self._files.file

    def offload(self, source: torch.Tensor) -> tuple[Slot, Copy]:
        """Start the copy to the file, straight from the tensor's pages."""
        address = source.data_ptr()
        return self._files.write(At(address), source.nbytes, skew=address % ALIGNMENT, keep=source)

    def reload(self, slot: Slot) -> tuple[torch.Tensor, Copy]:
        """A tensor within whole pages of its own, and the copy from the file straight into them.

        Raises SpillError when there is no memory for it.
        """
        assert isinstance(slot, FileSlot)
        place = slot.places[0]
        tensor = within(self._memory(place.span), place.skew, slot.nbytes)
        return tensor, self._files.read(slot, At(tensor.data_ptr()), keep=tensor)

    def discard(self, slot: Slot) -> None:
        """Free the slot once its copies are over."""
        assert isinstance(slot, FileSlot)
        self._files.discard(slot)

    def usage(self) -> dict[str, int]:
        """Bytes in the file; there are none in a host tier."""
        return {"host": 0, "host_peak": 0} | self._files.usage()

    def link(self) -> Link | None:
        """Bandwidth and latency of the copies so far; None before any."""
        return self._files.link("file")

    def stalled(self) -> tuple[float, float]:
        """Seconds that threads have waited for copies."""
        return self._files.out.meter.stalled, self._files.back.meter.stalled

    def stream(self) -> None:
        """A CPU has no streams."""

    def capturing(self) -> bool:
        """A CPU captures no graphs."""
        return False

    def calibrate(self, nbytes: int) -> Link:
        """Write and read `nbytes` of noise."""
        return calibrate(self, torch.device("cpu"), nbytes)

    def close(self) -> None:
        """Wait, end the threads, close the file."""
        self._files.close()
