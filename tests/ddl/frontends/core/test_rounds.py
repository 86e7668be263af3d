"""Rounds of two ranks, which are threads: what each learns of the other's announcements."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ddl.errors import RankTimeoutError, ShutdownError
from ddl.frontends.core import rounds
from ddl.frontends.core.announcements import Announcement, Batch
from ddl.frontends.core.rounds import Rounds
from ddl.request import Call


class Messages:
    """Those of two ranks, and how many of each kind there were."""

    def __init__(self) -> None:
        self.allreduces = self.allgathers = 0
        self._barrier = threading.Barrier(2, timeout=20)
        self._brought: dict[int, Any] = {}

    def _exchange(self, rank: int, mine: object) -> list[Any]:
        self._brought[rank] = mine
        self._barrier.wait()
        every = [self._brought[0], self._brought[1]]
        self._barrier.wait()
        return every

    def allreduce(self, call: Call[None]) -> None:
        rank, (sent, greatest) = call.arguments[-1], call.buffers
        greatest[:] = list(map(max, *self._exchange(rank, list(sent))))
        self.allreduces += rank == 0

    def allgather(self, mine: np.ndarray, comm: SimpleNamespace) -> np.ndarray:
        self.allgathers += comm.rank == 0
        return np.stack(self._exchange(comm.rank, mine))

    def round(self, *batches: Batch) -> list[tuple[list[Batch], Batch]]:
        """The result of a round on each rank, with its batch."""

        def take_part(rank: int, mine: Batch) -> tuple[list[Batch], Batch]:
            comm = SimpleNamespace(rank=rank, size=2, handle=rank)
            return Rounds(comm, comm).take_part(mine)

        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(take_part, (0, 1), batches))


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> Messages:
    made = Messages()
    monkeypatch.setattr(Call, "run", lambda call: made.allreduce(call))
    monkeypatch.setattr(rounds, "allgather", made.allgather)
    return made


def batch(names: str) -> Batch:
    return tuple(Announcement("allreduce", f"allreduce {name!r}", (("float32", (3,)),), "Sum") for name in names)


@pytest.mark.parametrize("names", ["", "a", "abc", "abc" * 80])
def test_the_same_calls_on_all_ranks_take_one_message(messages: Messages, names: str) -> None:
    mine = batch(names)
    assert messages.round(mine, mine) == [([mine, mine], ())] * 2
    assert (messages.allreduces, messages.allgathers) == (1, 0)


def test_what_a_rank_is_ahead_is_put_off(messages: Messages) -> None:
    first = batch("ab")
    assert messages.round(batch("abcd"), first) == [([first, first], batch("cd")), ([first, first], ())]
    assert (messages.allreduces, messages.allgathers) == (2, 0)


@pytest.mark.parametrize(
    ("mine", "theirs", "allreduces"),
    [("ab", "ba", 1), ("abc", "cab", 1), ("abc", "cb", 2), ("abc", "", 1), ("", "a" * 90, 1)],
)
def test_other_calls_are_told_in_full(messages: Messages, mine: str, theirs: str, allreduces: int) -> None:
    said = [batch(mine), batch(theirs)]
    assert messages.round(*said) == [(said, ())] * 2
    assert messages.allreduces == allreduces
    assert messages.allgathers == (2 if len(mine + theirs) > 10 else 1)  # a long one needs two


def test_a_rank_that_takes_no_part_is_named_in_the_scripts_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> None:
        raise RankTimeoutError(
            "rank 0 has waited 5 s in allreduce #7 of communicator 3 (int64, max, 6 elements): rank 1 has not called "
            "it; it has made no call on this communicator. DDL_TIMEOUT"
        )

    monkeypatch.setattr(Call, "run", run)
    comm = SimpleNamespace(rank=0, size=2, handle=0)
    with pytest.raises(RankTimeoutError, match=r"^rank 0 has waited 5 s: rank 1 has made no call. DDL_TIMEOUT$"):
        Rounds(comm, comm).take_part(batch("a"))


def test_a_rank_that_has_left_is_named_in_the_scripts_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> None:
        raise ShutdownError(
            "rank 0 has waited 0 s in allreduce #3 of communicator 5 (int64, max, 6 elements): rank 1 (host a) has "
            "freed the communicator without calling it; its last call was allreduce #2 of communicator 5 (int64, max, "
            "6 elements)"
        )

    monkeypatch.setattr(Call, "run", run)
    comm = SimpleNamespace(rank=0, size=2, handle=0)
    with pytest.raises(ShutdownError, match=r"^rank 0 has waited 0 s: rank 1 \(host a\) has left the process set, by"):
        Rounds(comm, comm).take_part(batch("a"))
