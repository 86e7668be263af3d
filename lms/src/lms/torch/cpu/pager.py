"""The CPU's pager: blocks of the page pool that leave to a file."""

from __future__ import annotations

import os
from collections.abc import Collection

import torch

from lms.memory import pager
from lms.memory.page_pool import LEAST
from lms.memory.transfer import FileEngine
from lms.torch.cpu.page_pool import find, pages
from lms.torch.pager import Pager
from lms.torch.saving import let_saves_read


class CpuPager(pager.Pager, Pager):
    """Faults bring back what is touched, so nothing needs to be told of uses that are not in the course."""

    device = torch.device("cpu")
    least = LEAST
    least_room = pager.PIECE * max(8, 2 * (os.cpu_count() or 1))  # what threads may use at once (recent_ in pager.cc)
    is_origin = True

    def __init__(self, engine: FileEngine) -> None:
        pool = find()
        assert pool is not None
        super().__init__(pool.library, engine)
        let_saves_read(self.reading)

    def memory(self, block: pager.Block) -> torch.Tensor:
        """Pages of the pool."""
        return pages(block.nbytes)

    def reach(self, position: int | None, used: Collection[pager.Block] = ()) -> None:
        """The step is at this position of the course, if it is known."""
        if position is not None:
            self.go_to(position)
