"""Objects between two ranks, which are threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ddl.frontends.core import objects

OBJECTS = ({"step": 3, "name": "b" * 1000}, None)


class Ranks:
    """The input of two ranks to each call."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=20)
        self._brought: dict[int, np.ndarray] = {}
        self.names: list[str | None] = []

    def exchange(self, rank: int, mine: np.ndarray, name: str | None) -> list[np.ndarray]:
        self._brought[rank] = mine.copy()
        if rank == 0:
            self.names.append(name)
        self._barrier.wait()
        every = [self._brought[0], self._brought[1]]
        self._barrier.wait()
        return every


def test_everyone_gets_the_roots_object() -> None:
    ranks = Ranks()

    def run(rank: int) -> object:
        def copy_from_root(array: np.ndarray, name: str | None) -> None:
            array[:] = ranks.exchange(rank, array, name)[1]

        return objects.broadcast(OBJECTS[rank], rank == 1, "state", copy_from_root)

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(run, (0, 1))) == [OBJECTS[1]] * 2
    assert ranks.names == ["state (an object's length)", "state (an object's content)"]


def test_everyones_objects_come_in_the_order_of_ranks() -> None:
    ranks = Ranks()

    def run(rank: int) -> object:
        return objects.allgather(
            OBJECTS[rank], None, lambda array, name: np.concatenate(ranks.exchange(rank, array, name))
        )

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(run, (0, 1))) == [list(OBJECTS)] * 2
    assert ranks.names == [None, None]
