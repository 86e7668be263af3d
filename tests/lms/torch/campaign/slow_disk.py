"""A file tier that takes its time: delays of random length in both copying threads, before a copy and behind it."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lms.memory.file import FileSlab, Place
from lms.memory.transfer import ThreadCopy

PACES = (0.0, 0.0002, 0.001, 0.004)  # seconds that a delay has at most


@contextmanager
def slow_disk(seed: int) -> Iterator[None]:
    """Within it each direction has a pace of its own, and one of them may have none."""
    rng = random.Random(seed)
    out, back = rng.choice(PACES), rng.choice(PACES[1:])
    before = rng.random()  # share of a delay that lies before the bytes move; the rest lies behind, before it is known
    write, read, finish = FileSlab.write, FileSlab.read, ThreadCopy.finish

    def delayed(pace: float) -> float:
        delay = rng.random() ** 2 * pace
        time.sleep(delay * before)
        return delay * (1 - before)

    def slow_write(self: FileSlab, place: Place, address: int) -> None:
        left = delayed(out)
        write(self, place, address)
        time.sleep(left)

    def slow_read(self: FileSlab, place: Place, address: int) -> None:
        left = delayed(back)
        read(self, place, address)
        time.sleep(left)

    def slow_finish(self: ThreadCopy, failed: object = None) -> None:
        if rng.random() < 0.1:
            time.sleep(rng.random() * 0.001)
        finish(self, failed)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSlab, "write", slow_write)
        patch.setattr(FileSlab, "read", slow_read)
        patch.setattr(ThreadCopy, "finish", slow_finish)
        yield
