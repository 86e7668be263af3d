"""Optimizers' state that stays on the device between steps although saved tensors leave."""

from __future__ import annotations

from collections.abc import Callable

from lms.core.budget import Client
from lms.core.link import Link
from lms.core.state_share import state_that_stays


class KeptState:
    """How many bytes of the state stay, because steps are foreseen to be shorter that way."""

    def __init__(self, state: Client) -> None:
        self._state = state
        self._held = 0  # bytes on the device in the last pass
        self._decided_for = 0  # bytes of state that there were when `nbytes` was decided
        self._gave_up_at: int | None = None  # the step in which LMS gave that up
        self.nbytes = 0

    def begin_pass(self) -> None:
        """A pass begins."""
        self._held = self._state.held

    @property
    def is_undecided(self) -> bool:
        """Whether there is more state than when that was decided."""
        return self._state.wanted > self._decided_for

    def decide(self, link: Link, pass_seconds: Callable[[int], float]) -> None:
        """Decide, unless LMS gave it up before; `pass_seconds` is as in `state_that_stays`."""
        if self._gave_up_at is None:
            self._decided_for = self._state.wanted
            self.nbytes = state_that_stays(self._decided_for, link, pass_seconds)

    def more_than_held(self, nbytes: int) -> int:
        """How many bytes `nbytes` of state are more than there were in the last pass."""
        return nbytes - self._held

    def give_up(self, step: int) -> bool:
        """Keep none from now on. Whether that makes room: the state leaves when the optimizer steps after `step`."""
        if self.nbytes:
            self.nbytes, self._gave_up_at = 0, step
        return self._gave_up_at == step
