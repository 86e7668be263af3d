"""What the callbacks have in common: the session of a training, and its figures in the trainer's log."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Unpack

import torch
from torch.optim.optimizer import Optimizer

from lms.options import Given
from lms.torch.session import Session


class Training:
    """One session at a time, with the options of `lms.LMS`."""

    def __init__(self, **options: Unpack[Given]) -> None:
        self.options = options
        self.session: Session | None = None

    def begin(self, model: torch.nn.Module, optimizers: Optimizer | Iterable[Optimizer] | None) -> None:
        """Open a session; one that is open, of a training that an exception ended, is closed before."""
        self.end()
        self.session = Session(model, optimizers, **self.options).open()

    def end(self) -> None:
        """Close the session, if there is one. Its figures can still be read."""
        if self.session is not None:
            self.session.close()

    def figures(self) -> dict[str, float]:
        """For a log, over the whole session: the device's peak and all bytes moved in GB, all waiting in seconds."""
        if self.session is None:
            return {}
        stats = {name: value or 0 for name, value in self.session.stats().items()}
        moved = sum(stats[name] for name in ("swapped_out", "swapped_in", "state_out", "state_in"))
        waited = sum(stats[name] for name in ("stall_out", "stall_in", "state_stall"))
        return {"lms_peak_gb": stats["peak"] / 1e9, "lms_moved_gb": moved / 1e9, "lms_waited_s": float(waited)}
