"""Signals that ask a training to stop or to write a snapshot: -sigint_effect and -sighup_effect.

SIGUSR1 counts as SIGINT and SIGUSR2 as SIGHUP: mpirun passes these two on to its ranks, and ends them for the others.
"""

from __future__ import annotations

import signal
from enum import IntEnum
from types import FrameType


class Action(IntEnum):
    """What is asked; if ranks are asked different things, the larger wins."""

    NONE = 0
    SNAPSHOT = 1
    STOP = 2


EFFECTS = {action.name.lower(): action for action in Action}


class Signals:
    """While it is entered, signals are kept until `take` is called, as Caffe did between two iterations.

    `launched`: SIGUSR1 and SIGUSR2 are ignored from then on. Another one, which a launcher sends while rank 0 writes
    the last snapshot, must not end the other ranks.
    """

    def __init__(self, sigint: str = "stop", sighup: str = "snapshot", *, launched: bool = False) -> None:
        self._launched = launched
        interrupt, hangup = EFFECTS[sigint], EFFECTS[sighup]
        self._effects = {signal.SIGINT: interrupt, signal.SIGUSR1: interrupt}
        self._effects |= {signal.SIGHUP: hangup, signal.SIGUSR2: hangup}
        self._asked = Action.NONE
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Signals:
        self._before = {number: signal.signal(number, self._note) for number in self._effects}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            late = self._launched and number in (signal.SIGUSR1, signal.SIGUSR2)
            signal.signal(number, signal.SIG_IGN if late else handler)  # type: ignore[arg-type]

    def take(self) -> Action:
        """What was asked since the last call."""
        asked, self._asked = self._asked, Action.NONE
        return asked

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._asked = max(self._asked, self._effects[signal.Signals(number)])
