"""Pagers: they let the memory of tensors leave the device and come back, at addresses that stay."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import torch

from lms.memory.pager import PagerUsage

Block = Any  # a pager's own: memory for one tensor after another, with `nbytes` and `transient`


class Pager(Protocol):
    """Whatever is foreseen, an operation finds the bytes it uses: foresight makes it fast."""

    device: torch.device
    least: int  # bytes; smaller tensors stay
    least_room: int  # bytes that a limit leaves at least for all of it
    is_origin: bool  # the device's new tensors are in its memory from the start

    def block(self, nbytes: int, *, transient: bool = False) -> Block:
        """A block of `nbytes`. If `transient`, its contents are freed soon after their last use of a step."""

    def memory(self, block: Block) -> torch.Tensor:
        """Uninitialised bytes on the device that can be tracked as this block's."""

    def track(self, block: Block, address: int) -> bool:
        """Let the memory of the tensor at `address` leave. False if it is not the pager's, or another block's."""

    def keep(self, nbytes: int, *, fill: bool = False) -> None:
        """Keep at most so many bytes of all blocks on the device; with `fill` more, while nothing else uses them."""

    def expect(self, course: Sequence[Collection[Block]]) -> None:
        """Foresee that a step uses these blocks, in this order."""

    def reach(self, position: int | None, used: Collection[Block]) -> None:
        """The step uses these blocks about now: at this position of the course, if it is known."""

    def usage(self) -> PagerUsage:
        """Figures, for any thread."""

    def check(self) -> None:
        """Raises SpillError if something could not leave since the last call."""

    def capturing(self) -> bool:
        """Whether what this thread computes is captured in a CUDA graph, and not run."""
        return False

    def stop(self) -> None:
        """Nothing leaves any more. What is away comes back when it is touched."""
