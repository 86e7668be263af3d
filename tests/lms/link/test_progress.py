"""The line that grows."""

from __future__ import annotations

import io

from lms.link.progress import Progress


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_it_is_written_over_and_gone_at_the_end() -> None:
    screen = Screen()
    with Progress(screen) as progress:
        progress.show(0.5, "file, out")
        progress.show(0.5, "file, out")
        progress.show(2.0, "file, back")
    first, second, last = screen.getvalue().split("\r")[1:]
    assert first == f"[{'#' * 12}{'.' * 12}] file, out\x1b[K"
    assert second.startswith(f"[{'#' * 24}] file, back")
    assert last == "\x1b[K"


def test_elsewhere_it_says_nothing() -> None:
    stream = io.StringIO()
    with Progress(stream) as progress:
        progress.show(0.5, "file, out")
    assert stream.getvalue() == ""
