"""The CPU engine: RAM to a file, and back into whole pages."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lms.memory.file import FileSlab
from lms.memory.slab import ALIGNMENT
from lms.memory.slots import Slot
from lms.memory.transfer import Copy, FileEngine, FileSlot, Memory
from lms.torch.cpu.page_pool import pages
from lms.torch.cuda.streams import within
from lms.torch.engine import Engine


class CpuEngine(FileEngine, Engine):
    """RAM to a slab file. Each tensor comes back into memory of its own, which is free again when it dies.

    `memory` gives it: so many bytes as a uint8 tensor that starts on a page.
    """

    def __init__(self, file: FileSlab, *, memory: Callable[[int], torch.Tensor] = pages) -> None:
        super().__init__(file)
        self.name = f"file in {file.directory}"
        self.device = torch.device("cpu")
        self._memory = memory

    def offload(self, source: torch.Tensor) -> tuple[Slot, Copy]:
        """Start the copy to the file, straight from the tensor's pages."""
        address = source.data_ptr()
        return self.write(Memory(address), source.nbytes, skew=address % ALIGNMENT, keep=source)

    def reload(self, slot: Slot) -> tuple[torch.Tensor, Copy]:
        """A tensor within whole pages of its own, and the copy from the file straight into them.

        Raises SpillError when there is no memory for it.
        """
        assert isinstance(slot, FileSlot)
        place = slot.places[0]
        tensor = within(self._memory(place.span), place.skew, slot.nbytes)
        return tensor, self.read(slot, Memory(tensor.data_ptr()), keep=tensor)
