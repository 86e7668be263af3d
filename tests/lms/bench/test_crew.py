"""Progress with the time left, and processes that end when they should not."""

from __future__ import annotations

import io

import pytest
from crew import Progress, Worker, WorkerError


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_with_the_time_left() -> None:
    terminal = Terminal()
    progress = Progress(4, terminal)
    progress.advance("gpt: plain")
    progress.advance("gpt: plain")
    progress.close()
    last = terminal.getvalue().split("\r")[-1]
    assert f"[{'#' * 12}{'.' * 12}]" in last
    assert "2/4 steps, 0 min 00 s left" in last


def test_elsewhere_there_is_a_line_for_each_tenth() -> None:
    log = io.StringIO()
    progress = Progress(100, log)
    for _ in range(100):
        progress.advance("x")
    assert 10 <= len(log.getvalue().splitlines()) <= 11
    assert "\r" not in log.getvalue()


def test_a_process_that_dies_is_an_error_with_its_last_words() -> None:
    with pytest.raises(WorkerError, match="KeyError: 'no such model'"):
        Worker(
            {"model": "no such model", "size": "quick", "kind": "plain", "budget": None, "device": "cpu", "threads": 1}
        )
