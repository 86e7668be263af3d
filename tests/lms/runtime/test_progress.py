"""Passes, steps and the cycle from step to step, by a clock that the test sets."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from lms.core.trace import Access, Tensor, Trace
from lms.runtime.progress import FIRST_PASSES, FIRST_STEPS, KEPT, Cycle, Progress

PASS = Trace((Tensor(100, freed=2),), (Access("write", 0, 1.0), Access("read", 0, 1.0)))


class Clock:
    """A device that computes or waits as the test has it; one that runs on its own does not tell which."""

    def __init__(self, *, own: bool = False) -> None:
        self.now = self.work = 0.0
        self.own = own
        self.done = float("inf")  # what it has come to

    def compute(self, seconds: float) -> None:
        self.now += seconds
        self.work += seconds

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def mark(self) -> object:
        return self.now

    def reached(self, mark: float) -> bool:
        return mark <= self.done

    def elapsed(self, marks: Sequence[object]) -> list[float]:
        return [after - before for before, after in pairwise(marks)]  # type: ignore[operator]

    def computed(self) -> float | None:
        return None if self.own else self.work


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def progress(clock: Clock) -> Progress:
    return Progress(clock)  # type: ignore[arg-type]


def train(progress: Progress, clock: Clock, *, wait: float, passes: int = 1, own: float = 0.0) -> None:
    """A step: waiting for data, passes of 2 s and an optimizer's step of half a second."""
    clock.wait(wait)
    for _ in range(passes):
        progress.begin_pass()
        clock.compute(2.0)
        progress.end_pass(trained=True)
    clock.compute(0.5)
    progress.step(own, recorded=100 * progress.passes)


def test_a_cycle_is_known_after_the_second_step(progress: Progress, clock: Clock) -> None:
    train(progress, clock, wait=5.0)
    assert progress.cycle() is None
    assert progress.cycled(PASS) == PASS
    train(progress, clock, wait=5.0)
    trace = progress.cycled(PASS)
    assert (trace.cycle, trace.busy, trace.passes) == (7.5, 2.5, 1.0)
    assert trace.step_seconds(trace.seconds) == 7.5
    assert (progress.steps, progress.passes, progress.trained) == (2, 2, 2)


def test_a_device_that_runs_on_its_own_was_idle_from_a_step_to_the_first_pass_after_it() -> None:
    clock = Clock(own=True)
    progress = Progress(clock)  # type: ignore[arg-type]
    for _ in range(3):
        train(progress, clock, wait=5.0, passes=2)
    cycle = progress.cycle()
    assert cycle is not None
    assert (cycle.seconds, cycle.busy) == (9.5, 4.5)


def test_who_does_not_wait_sees_the_cycles_that_the_device_has_come_to_the_end_of() -> None:
    clock = Clock(own=True)
    progress = Progress(clock)  # type: ignore[arg-type]
    clock.done = 0.0
    for _ in range(2):
        train(progress, clock, wait=5.0)
    assert progress.cycle(wait=False) is None
    clock.done = clock.now
    train(progress, clock, wait=1.0)
    assert (progress.cycle(wait=False), len(progress.cycles)) == (Cycle(7.5, 2.5, 100), 1)
    assert progress.cycle() == Cycle(5.5, 2.5, 100)


def test_a_pass_that_outlasts_the_step_leaves_no_idle_time_to_see() -> None:
    clock = Clock(own=True)
    progress = Progress(clock)  # type: ignore[arg-type]
    progress.step(0.0, 0)
    clock.compute(3.0)
    progress.step(0.0, 100)
    cycle = progress.cycle()
    assert cycle is not None
    assert cycle.busy == cycle.seconds == 3.0


def test_passes_of_a_step_that_accumulates_gradients_are_counted_by_their_bytes(
    progress: Progress, clock: Clock
) -> None:
    for _ in range(3):
        train(progress, clock, wait=1.0, passes=4)
    trace = progress.cycled(PASS)
    assert (trace.cycle, trace.passes) == (9.5, 4.0)
    assert trace.step_seconds(2.5) == 11.5


def test_what_lms_added_is_left_out(progress: Progress, clock: Clock) -> None:
    train(progress, clock, wait=1.0, own=3.0)
    clock.wait(0.25)  # for a copy
    train(progress, clock, wait=1.0, own=3.25)
    assert progress.cycled(PASS).cycle == 3.5


def test_a_long_evaluation_is_no_part_of_the_usual_cycle(progress: Progress, clock: Clock) -> None:
    for step in range(7):
        train(progress, clock, wait=1.0)
        if step == 4:
            clock.compute(1000.0)
    assert (progress.cycled(PASS).cycle, progress.cycled(PASS).busy) == (3.5, 2.5)


def test_cycles_of_long_ago_are_forgotten(progress: Progress, clock: Clock) -> None:
    for step in range(KEPT * 3):
        train(progress, clock, wait=1.0 if step < KEPT * 2 else 2.0)
    assert progress.cycled(PASS).cycle == 4.5
    assert len(progress.step_times) == KEPT * 3 - 1


def test_a_step_without_a_clock_counts_and_ends_the_cycles_beside_it(progress: Progress, clock: Clock) -> None:
    train(progress, clock, wait=1.0)
    clock.wait(50.0)
    progress.step(0.0, 100, clocked=False)
    clock.wait(50.0)
    train(progress, clock, wait=1.0)
    assert progress.steps == 3
    assert progress.cycle() is None


def test_passes_without_a_backward_do_not_make_a_training_old(progress: Progress, clock: Clock) -> None:
    for _ in range(10):
        progress.end_pass(trained=False)
    assert progress.early
    for _ in range(FIRST_PASSES + 1):
        assert progress.early
        progress.end_pass(trained=True)
    assert not progress.early
    for _ in range(FIRST_STEPS):
        progress.step(0.0, 0)
        assert progress.early, "steps tell better than passes"
    progress.step(0.0, 0)
    assert not progress.early
