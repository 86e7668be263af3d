"""A line on stderr that grows while something takes its time; silent if stderr is no terminal."""

from __future__ import annotations

import sys
from typing import TextIO

_WIDTH = 24


class Progress:
    """Shares of a whole, one stage after the other: a context manager that leaves no trace on the screen."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._shown = self._stream is not None and self._stream.isatty()
        self._last = ""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._write("")

    def show(self, share: float, text: str) -> None:
        """Draw `share` (0 to 1) of the whole, and what is being done."""
        full = round(min(max(share, 0.0), 1.0) * _WIDTH)
        self._write(f"[{'#' * full}{'.' * (_WIDTH - full)}] {text}")

    def _write(self, line: str) -> None:
        if self._shown and line != self._last:
            self._stream.write(f"\r{line}\x1b[K")
            self._stream.flush()
            self._last = line
