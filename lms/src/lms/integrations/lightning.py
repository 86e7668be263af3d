"""LMS for the `Trainer` of Lightning."""

from __future__ import annotations

from typing import Any, Unpack

from lightning import Callback

from lms.integrations.training import Training
from lms.options import Given
from lms.torch.session import Session


class LMSCallback(Callback):  # type: ignore[misc]  # it is not installed where types are checked
    """`Trainer(..., callbacks=[LMSCallback(limit="12GB")])`: a session from the beginning of the training to its end.

    Takes the options of `lms.LMS`. Each epoch logs `lms_peak_gb`, `lms_moved_gb` and `lms_waited_s`.
    """

    def __init__(self, **options: Unpack[Given]) -> None:
        self._training = Training(**options)

    @property
    def session(self) -> Session | None:
        """The session of this training, or of the last one; None before the first."""
        return self._training.session

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Open the session: the optimizers are there, and a checkpoint is loaded."""
        self._training.begin(pl_module, trainer.optimizers)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the figures."""
        pl_module.log_dict(self._training.figures())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Close the session."""
        self._training.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Close the session."""
        self._training.end()
