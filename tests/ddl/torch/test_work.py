"""Works, and the threads that see to those nobody waits for."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import Future

import pytest

from ddl.torch import work as module
from ddl.torch.work import Reaper


class Looked:
    """Is over at the third look."""

    def __init__(self) -> None:
        self.looks = 0
        self.settled: Future[None] = Future()

    def test(self) -> bool:
        self.looks += 1
        return self.looks == 3

    def settle(self) -> None:
        self.settled.set_result(None)


def test_a_message_is_looked_for_again_however_late_its_thread_is(monkeypatch: pytest.MonkeyPatch) -> None:
    # As on a machine that is so busy that each nap is over before it has begun.
    monkeypatch.setattr(module, "_SHORTEST_NAP", 2e-6)
    monkeypatch.setattr(module, "_LONGEST_NAP", 2e-6)
    reaper = Reaper("test", any_order=True)
    for _ in range(6000):
        work = Looked()
        reaper.add(work)  # type: ignore[arg-type]
        work.settled.result(timeout=10)
    reaper.stop()


class Chained:
    """Is over; a callback of its future waits for the next one's."""

    def __init__(self, after: Chained | None) -> None:
        self.after = after
        self.settled: Future[None] = Future()

    def test(self) -> bool:
        return True

    def end(self) -> None:
        pass

    def settle(self) -> None:
        if self.after is not None:
            self.after.settled.result(timeout=10)
        self.settled.set_result(None)


@pytest.mark.parametrize("any_order", [False, True])
def test_a_callback_may_wait_for_a_work_that_was_given_later(any_order: bool) -> None:
    reaper = Reaper("test", any_order=any_order)
    works = [Chained(None)]
    for _ in range(20):
        works.insert(0, Chained(works[0]))
    for work in works:
        reaper.add(work)  # type: ignore[arg-type]
    works[0].settled.result(timeout=10)
    later = Chained(None)
    reaper.add(later)  # type: ignore[arg-type]
    later.settled.result(timeout=10)
    reaper.stop()
    last = Chained(None)  # what comes after stop() is seen to all the same
    reaper.add(last)  # type: ignore[arg-type]
    last.settled.result(timeout=10)


def test_a_forks_child_ends_though_a_thread_of_its_parent_held_a_lock() -> None:
    reaper = Reaper("held", any_order=False)
    held, forked = threading.Event(), threading.Event()

    def hold() -> None:
        with reaper._changed:
            held.set()
            forked.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        module._end_threads()
        os._exit(0)
    forked.set()
    holder.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
