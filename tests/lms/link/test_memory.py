"""Copies in memory: that bytes are copied at all, in every size, by every thread."""

from __future__ import annotations

import os
import threading
import time

import numpy
import pytest

from lms.link import memory
from lms.link.memory import host_copies

MB = 1 << 20


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("nbytes", [4096, 65536, 4 * MB, 16 * MB])
def test_a_copy_takes_time_that_its_bytes_explain(threads: int, nbytes: int) -> None:
    with host_copies(16 * MB, threads=threads) as copy:
        copy(nbytes)
        rate = nbytes / min(copy(nbytes) for _ in range(5))
    assert 1e8 < rate < 1e13


def test_the_bytes_of_small_copies_arrive() -> None:
    source, target = numpy.zeros(MB, numpy.uint8), numpy.zeros(MB, numpy.uint8)
    source[:] = 7
    target[:] = 0
    numpy.copyto(memory._turns(target, 4096, 10), memory._turns(source, 4096, 10))
    assert (target[:4096] == 7).all()
    assert (target[4096:] == 0).all()


@pytest.mark.alone
def test_small_copies_are_whole_ones_and_no_bytes_by_themselves() -> None:
    # One by one they would take a hundred times as long, and the figure would be of NumPy's loop.
    source, target = numpy.zeros(MB, numpy.uint8), numpy.zeros(MB, numpy.uint8)
    whole, many = memory._turns(source, 65536, 64), memory._turns(target, 65536, 64)

    def best(copy: object) -> float:
        times = []
        for _ in range(5):
            start = time.perf_counter()
            copy()  # type: ignore[operator]
            times.append(time.perf_counter() - start)
        return min(times)

    turns = best(lambda: numpy.copyto(many, whole))
    single = best(lambda: [numpy.copyto(target[:65536], source[:65536]) for _ in range(64)])
    assert turns < 5 * single


def test_threads_keep_to_their_processors_and_the_caller_to_his() -> None:
    mine = os.sched_getaffinity(0)
    one = min(mine)
    seen: list[set[int]] = []
    with memory._Crew(2, [one]) as crew:
        crew.all(lambda _: seen.append(os.sched_getaffinity(0)))
    assert seen == [{one}, {one}]
    assert os.sched_getaffinity(0) == mine


def test_if_a_thread_cannot_be_started_no_other_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    started = 0
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        nonlocal started
        started += 1
        if started > 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    with memory._Crew(3, []) as crew:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start"):
            crew.all(lambda at: at)


def test_if_a_thread_fails_no_other_waits_for_it() -> None:
    def work(at: int) -> None:
        if at == 0:
            raise ValueError("mine")
        crew.gate.wait()

    with memory._Crew(2, []) as crew, pytest.raises(ValueError, match="mine"):
        crew.all(work)


def test_a_thread_that_learns_late_that_all_have_started_ends_too() -> None:
    class Late(threading.Barrier):
        """Lets the last one pass, and the others only when it is broken."""

        def wait(self, timeout: float | None = None) -> int:
            with late:
                waiting.append(None)
                if len(waiting) == self.parties:
                    return 0
            return super().wait(timeout)

    def work(at: int) -> None:
        raise ValueError("mine")

    waiting: list[None] = []
    late = threading.Lock()
    with memory._Crew(2, []) as crew:
        crew._started = Late(2)
        with pytest.raises(ValueError, match="mine"):
            crew.all(work)
