"""A pause in a session."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lms.torch.session import Session


class Pause:
    """What `Session.pause` returns."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._between = False  # it begins between two passes

    def __enter__(self) -> None:
        session = self._session
        self._between = not session._pauses and session._swapper.between_passes
        if self._between:
            session._note()
            session._planner.peaks.pause()
        session._pauses += 1
        session._swapper.native.open = False

    def __exit__(self, *_: object) -> None:
        session = self._session
        session._pauses -= 1
        session._swapper.native.open = session._is_open and not session._pauses
        if self._between and session._is_open:
            session._planner.peaks.resume()
