"""How the time is shared among links, and what becomes of a link that fails."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from lms.errors import SpillError
from lms.link.draft import Draft, Task, run
from lms.link.profile import Absence, MeasuredLink
from lms.link.sweep import QUICK_SIZES, SIZES, Copy

GB = 1 << 30


class Clock:
    """A clock that copies move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def link(self, rate: float, *, prepare: float = 0.0, fail: Exception | None = None) -> Callable[[], object]:
        @contextmanager
        def opened() -> Iterator[Copy]:
            self.now += prepare

            def copy(nbytes: int) -> float:
                if fail is not None:
                    raise fail
                self.now += nbytes / rate
                return nbytes / rate

            yield copy

        return opened


def task(direction: str, opened: object, weight: float = 1.0) -> Task:
    return Task(direction, lambda: "O_DIRECT", opened, SIZES, weight)  # type: ignore[arg-type]


def draft(name: str, *tasks: Task) -> Draft:
    return Draft(MeasuredLink(name, "file", "a disk"), list(tasks))


def test_all_is_measured_in_the_time() -> None:
    clock = Clock()
    drafts = [
        draft("a", *(task(way, clock.link(1e9)) for way in ("out", "back", "both"))),
        draft("b", task("copy", clock.link(10e9))),
    ]
    absent: list[Absence] = []
    one, other = run(drafts, 40.0, absent, clock)
    assert [series.direction for series in one.series] == ["out", "back", "both"]
    assert len(other.series) == 1
    assert clock.now < 45
    assert absent == []


def test_both_ways_count_the_bytes_of_both() -> None:
    clock = Clock()
    (link,) = run([draft("a", task("out", clock.link(1e9)), task("both", clock.link(1e9)))], 20.0, [], clock)
    out, both = link.series
    assert both.rate == 2 * out.rate
    assert both.points[0].nbytes == 2 * out.points[0].nbytes


def test_time_that_preparation_takes_is_the_tasks_own() -> None:
    clock = Clock()
    run(
        [draft("a", task("out", clock.link(1e9, prepare=5.0)), task("back", clock.link(1e9)))],
        20.0,
        [],
        clock,
    )
    assert clock.now < 24


def test_a_link_that_fails_is_named_and_the_others_are_measured() -> None:
    clock = Clock()
    absent: list[Absence] = []
    broken = task("back", clock.link(1e9, fail=SpillError("the disk\nis full")))
    closed: list[str] = []
    drafts = [
        draft("a", task("out", clock.link(1e9)), broken, task("both", clock.link(1e9))),
        draft("b", task("copy", clock.link(1e9))),
    ]
    for one in drafts:
        one.close = lambda name=one.link.name: closed.append(name)  # type: ignore[misc]
    links = run(drafts, 20.0, absent, clock)
    assert [(link.name, len(link.series)) for link in links] == [("a", 2), ("b", 1)]
    assert absent == [Absence("a, back", "the disk is full")]
    assert closed == ["a", "b"]


def test_what_fails_in_each_task_is_named_once() -> None:
    clock = Clock()
    absent: list[Absence] = []
    lost = [task(way, clock.link(1.0, fail=RuntimeError("the GPU is lost"))) for way in ("out", "back", "both")]
    assert run([draft("a", *lost)], 1.0, absent, clock) == []
    assert absent == [Absence("a, out", "the GPU is lost")]


def test_a_link_of_which_nothing_was_measured_is_none() -> None:
    clock = Clock()
    absent: list[Absence] = []
    assert run([draft("a", task("out", clock.link(1.0, fail=RuntimeError("CUDA error"))))], 1.0, absent, clock) == []
    assert absent[0].why == "CUDA error"


def test_sizes_that_were_left_out_are_said() -> None:
    clock = Clock()
    (link,) = run([draft("a", task("out", clock.link(0.1e9)))], 10.0, [], clock)
    assert "out, O_DIRECT: sizes above 67.1 MB left out: there was no time for them" in link.notes


def test_each_direction_that_was_shortened_is_said_also_if_an_earlier_one_is_the_reason() -> None:
    clock, largest = Clock(), [GB]
    out = task("out", clock.link(0.1e9))
    out.done = lambda series: largest.__setitem__(0, series.points[-1].nbytes)  # what was not written cannot be read
    back = task("back", clock.link(9e9))
    back.most = lambda: largest[0]
    both = task("both", clock.link(9e9))
    both.most = lambda: largest[0] // 2
    (link,) = run([draft("a", out, back, both)], 30.0, [], clock)
    assert [series.points[-1].nbytes for series in link.series] == [1 << 26, 1 << 26, 1 << 25]
    assert [note.split(" left")[0] for note in link.notes] == [
        "out, O_DIRECT: sizes above 67.1 MB",
        "back, O_DIRECT: sizes above 67.1 MB",
        "both, O_DIRECT: sizes above 33.6 MB",
    ]


@pytest.mark.parametrize("rate", [0.1e9 * 1.3**step for step in range(20)])
def test_while_a_direction_was_shortened_no_time_is_left_unused(rate: float) -> None:
    clock = Clock()
    tasks = [Task(way, lambda: "O_DIRECT", clock.link(rate), QUICK_SIZES) for way in ("out", "back")]  # type: ignore[arg-type]
    (link,) = run([draft("a", *tasks)], 7.0, [], clock)
    assert not link.notes or clock.now > 0.75 * 7.0


def test_without_a_copy_past_the_caches_there_is_no_figure() -> None:
    clock = Clock()
    slow = Task("copy", lambda: "1 thread", clock.link(1e6), SIZES, least=GB)  # type: ignore[arg-type]
    absent: list[Absence] = []
    assert run([draft("memory", slow)], 10.0, absent, clock) == []
    (one,) = absent
    assert one.why == (
        "1 thread: no copy of 1.07 GB or more fitted into the time, and smaller ones may lie in the caches"
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_what_is_measured_and_is_clean_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, terminal, file = Clock(), Terminal(), io.StringIO()
    for stream in (terminal, file):
        monkeypatch.setattr(sys, "stderr", stream)
        run([draft("a", task("out", clock.link(1e9)), task("back", clock.link(1e9)))], 20.0, [], clock)
    assert terminal.getvalue() == "\r  0%  a, out\x1b[K\r 50%  a, back\x1b[K\r\x1b[K"
    assert file.getvalue() == ""
