"""Works, and the threads that see to those nobody waits for."""

from __future__ import annotations

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
