"""The processes that train together, where ddlrun started several.

There is one brain, and it gets new noise in each step: the batch of a step is one noisy copy for each rank. What one
process would do with the whole batch, and what the ranks do, is the same training.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BACKEND = "ddl"


@dataclass(frozen=True)
class Ranks:
    """This process's place among those that train together; alone it is 0 of 1, and nothing is exchanged."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # on this host

    @property
    def leads(self) -> bool:
        """Whether this one prints and writes files; the others' would be the same."""
        return self.rank == 0

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model as it trains: its gradients are averaged over all ranks, and rank 0's parameters begin."""
        return DistributedDataParallel(model) if self.size > 1 else model

    def own(self, draw: Callable[[], torch.Tensor]) -> torch.Tensor:
        """This rank's of what `draw` gives for each.

        Every rank draws for all: the state of the random generator, and so a checkpoint, is the same everywhere.
        """
        drawn = draw()
        for number in range(1, self.size):
            other = draw()
            if number == self.rank:
                drawn = other
        return drawn

    def mean(self, loss: torch.Tensor) -> float:
        """The loss of the whole batch, from each rank's."""
        whole = loss.detach().clone()
        if self.size > 1:
            dist.all_reduce(whole, dist.ReduceOp.AVG)
        return whole.item()

    def agree(self, value: str) -> bool:
        """Whether all ranks have the same."""
        every = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(every, value)
        return len(set(every)) == 1


@contextmanager
def joined() -> Iterator[Ranks]:
    """Join the others, as the variables of torchrun's kind say, which ddlrun sets too. Raises what joining raises."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield Ranks()
        return
    dist.init_process_group(BACKEND)
    yield Ranks(dist.get_rank(), dist.get_world_size(), int(os.environ.get("LOCAL_RANK", "0")))
    dist.destroy_process_group()  # not after an error: the others are told of it when this process ends
