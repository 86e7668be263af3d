"""LMS for the `Trainer` of transformers, and for the trainers that are made from it, such as trl's."""

from __future__ import annotations

from typing import Any, Unpack

from transformers import TrainerCallback

from lms.integrations.training import Training
from lms.options import Given
from lms.torch.session import Session


class LMSCallback(TrainerCallback):  # type: ignore[misc]  # its library has no types
    """`Trainer(..., callbacks=[LMSCallback(limit="12GB")])`: a session from the beginning of `train` to its end.

    Takes the options of `lms.LMS`. Each entry of the trainer's log has `lms_peak_gb`, `lms_moved_gb` and
    `lms_waited_s`. If `train` raises, the session stays open until the next `train`, or `lms.disable()`.
    """

    def __init__(self, **options: Unpack[Given]) -> None:
        self._training = Training(**options)

    @property
    def session(self) -> Session | None:
        """The session of this training, or of the last one; None before the first."""
        return self._training.session

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        """Open the session."""
        self._training.begin(model, optimizer)

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Any = None, **_: Any) -> None:
        """Add the figures to the entry, which the trainer has put into its history already."""
        figures = self._training.figures()
        for entry in (logs, state.log_history[-1] if state.log_history else None):
            if entry is not None:
                entry.update(figures)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Close the session."""
        self._training.end()
