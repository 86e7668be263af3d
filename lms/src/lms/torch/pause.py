"""A pause in a session."""

from __future__ import annotations

from collections.abc import Callable


class Pause:
    """Returned by `Session.pause`. `begin` returns whether the pause lies between two passes, and `end` is told so."""

    def __init__(self, begin: Callable[[], bool], end: Callable[[bool], None]) -> None:
        self._begin = begin
        self._end = end
        self._between = False

    def __enter__(self) -> None:
        self._between = self._begin()

    def __exit__(self, *_: object) -> None:
        self._end(self._between)
