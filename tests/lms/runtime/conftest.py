"""A device for the tests of the runtime."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from lms.memory.device import Peak


class Machine:
    """A device with a clock and a peak of the test's choice."""

    name = "cpu"

    def __init__(self) -> None:
        self.now = 0.0
        self.most = 0
        self.idle = 0
        self.resets = 0

    def capacity(self) -> int:
        return 10**6

    def current(self) -> int:
        return self.most

    def peak(self) -> Peak:
        return Peak(self.most, self.most - self.idle)

    def reset_peak(self) -> None:
        self.resets += 1

    def mark(self) -> object:
        return self.now

    def reached(self, mark: object) -> bool:
        return True

    def elapsed(self, marks: Sequence[object]) -> list[float]:
        return [b - a for a, b in pairwise(marks)]  # type: ignore[operator]

    def computed(self) -> float | None:
        return self.now

    def prepare(self, limit: int | None) -> str | None:
        return None

    def release(self) -> None:
        pass


@pytest.fixture
def machine() -> Machine:
    return Machine()
