"""Running statistics of batch norms, which follow each forward: a repeated one must not write to them again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm

Buffers = dict[str, torch.Tensor | None]


def running_statistics(module: Module) -> list[tuple[Buffers, Buffers]]:
    """The buffers of the module's batch norms that train, and copies of what they are now."""
    buffers = [part._buffers for part in _training_batch_norms(module)]
    return list(zip(buffers, map(_copies, buffers), strict=True))


@contextmanager
def statistics_as_they_were(then: list[tuple[Buffers, Buffers]]) -> Iterator[None]:
    """A forward inside finds the running statistics that it found the first time, and writes to copies of them."""
    now = [(buffers, dict(buffers)) for buffers, _ in then]
    for buffers, before in then:
        buffers.update(_copies(before))
    try:
        yield
    finally:
        for buffers, own in now:
            buffers.update(own)


def _copies(buffers: Buffers) -> Buffers:
    return {name: one.clone() if one is not None else None for name, one in buffers.items()}


def statistics_of(module: Module) -> set[int]:
    """The ids of the running statistics that the module's forward changes."""
    return {id(one) for part in _training_batch_norms(module) for one in part.buffers(recurse=False)}


def _training_batch_norms(module: Module) -> list[_BatchNorm]:
    return [
        part
        for part in module.modules()
        if isinstance(part, _BatchNorm)
        and type(part).forward is _BatchNorm.forward
        and part.training
        and part.track_running_stats
    ]
