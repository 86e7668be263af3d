"""The thread that reads counters: what it adds up, and what it costs."""

from __future__ import annotations

import threading
import time

import pytest

from lms.errors import LMSError
from lms.link.counters import Reading
from lms.link.watch import SHARE, Tally, Watch, Watched

GB = 10**9


class Steps:
    """Counters that grow by a step with each reading, and fail after so many."""

    what = "paper"
    wraps = 1 << 64
    most = 0.0

    def __init__(self, *, fail_after: int = 10**9, cost: float = 0.0) -> None:
        self.count = 0
        self.closed = 0
        self.enough = threading.Event()
        self._fail_after, self._cost = fail_after, cost

    def read(self) -> Reading:
        if self.count >= self._fail_after:
            self.enough.set()
            raise LMSError("the GPU fell off the bus")
        self.count += 1
        end = time.thread_time() + self._cost
        while time.thread_time() < end:
            pass
        if self.count >= 5:
            self.enough.set()
        return Reading(10 * self.count, 20 * self.count, 100 - self.count, 0.5)

    def close(self) -> None:
        self.closed += 1


def test_all_that_was_counted_from_beginning_to_end_is_told() -> None:
    counters = Steps()
    watch = Watch(counters, interval=0.001)
    assert counters.enough.wait(60)
    watched = watch.stop()
    assert watched.readings == counters.count >= 5
    assert watched.out == 10 * (counters.count - 1)
    assert watched.back == 20 * (counters.count - 1)
    assert watched.memory == 99
    assert watched.busy == 0.5
    assert len(watched.samples) == counters.count - 1
    assert watched.error == ""
    assert counters.closed == 1


def test_stopping_twice_gives_the_same() -> None:
    counters = Steps()
    watch = Watch(counters, interval=0.001)
    assert watch.stop() == watch.stop()
    assert counters.closed == 1


def test_a_gpu_that_is_lost_ends_the_readings_and_keeps_what_was_counted() -> None:
    counters = Steps(fail_after=5)
    watch = Watch(counters, interval=0.001)
    assert counters.enough.wait(60)
    watched = watch.stop()
    assert "fell off the bus" in watched.error
    assert watched.out == 40


def test_dear_readings_are_read_the_less_often() -> None:
    counters = Steps(cost=0.002)
    start = time.perf_counter()
    watch = Watch(counters, interval=0.001)
    assert counters.enough.wait(100)
    took = time.perf_counter() - start
    watched = watch.stop()
    assert watched.cost > 0
    # The first reading is the caller's, the last may just have begun.
    assert took > (counters.count - 3) * 0.002 / SHARE / 2


def summary(what: str, readings: list[tuple[float, Reading]], *, wraps: int = 1 << 64, most: float = 0.0) -> Watched:
    tally = Tally(wraps, most)
    for at, reading in readings:
        tally.add(at, reading)
    return tally.watched(what)


def test_a_counter_that_begins_anew_goes_on() -> None:
    readings = [(0.0, Reading(out=(1 << 32) - 100, back=5)), (0.1, Reading(out=50, back=6))]
    watched = summary("x", readings, wraps=1 << 32, most=1e9)
    assert (watched.out, watched.back) == (150, 1)


def test_a_counter_that_may_have_begun_anew_twice_is_not_told() -> None:
    readings = [(0.0, Reading(out=(1 << 32) - 100, back=5)), (1.0, Reading(out=50, back=6))]
    watched = summary("x", readings, wraps=1 << 32, most=25e9)
    assert (watched.out, watched.back) == (None, None)
    assert "began anew, and may have done so more than once" in watched.error


def test_a_counter_of_32_bits_keeps_its_sum_however_long_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    step = 3 * GB  # in 0.05 s, as over PCIe 5: all but every reading sees it begin anew
    readings = [(0.05 * at, Reading(out=at * step % (1 << 32), back=0)) for at in range(2100)]
    watched = summary("x", readings, wraps=1 << 32, most=63e9)
    assert watched.out == 2099 * step
    assert watched.back == 0
    assert watched.error == ""
    assert len(watched.samples) < 2000


def test_a_counter_is_read_as_often_as_it_may_begin_anew() -> None:
    counters = Steps()
    counters.wraps, counters.most = 1 << 32, 1e14  # every 43 us
    start = time.perf_counter()
    watch = Watch(counters, interval=60.0)
    assert counters.enough.wait(60)
    watch.stop()
    assert time.perf_counter() - start < 60


def test_one_late_reading_among_many_does_not_take_the_figure() -> None:
    readings = [(0.05 * at, Reading(out=at * 3 * GB % (1 << 32), back=at)) for at in range(1000)]
    late = [*readings, (readings[-1][0] + 0.1, Reading(out=(999 * 3 * GB + 1) % (1 << 32), back=1001))]
    assert summary("x", late, wraps=1 << 32, most=63e9).out == 999 * 3 * GB + 1


def test_large_counters_wrap_at_64_bits() -> None:
    readings = [(0.0, Reading(out=(1 << 64) - 1)), (0.1, Reading(out=9))]
    assert summary("x", readings, wraps=1 << 32).out == 10


def test_what_is_not_counted_is_none_and_no_zero() -> None:
    watched = summary("x", [(0.0, Reading(out=1)), (1.0, Reading(out=3))])
    assert (watched.out, watched.back, watched.memory, watched.busy) == (2, None, None, None)


def test_a_reading_alone_says_nothing() -> None:
    watched = summary("x", [(0.0, Reading(out=1, back=1))])
    assert (watched.out, watched.back, watched.samples) == (None, None, ())


def test_a_long_run_keeps_its_whole_tally(monkeypatch: pytest.MonkeyPatch) -> None:
    from lms.link import watch as module

    monkeypatch.setattr(module, "_KEEP", 4)
    counters = Steps()
    watch = Watch(counters, interval=0.0001)
    assert counters.enough.wait(60)
    watched = watch.stop()
    assert len(watched.samples) <= 5
    assert watched.out == 10 * (counters.count - 1)  # from the first reading to the last, whatever went between
