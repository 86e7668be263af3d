"""Who is timed, when, and for how long. Pure but for the clock, which is the crews'.

For each size every contestant first computes a sum that is known, then takes a trial turn; of each family's variants
the best few by that trial stay. Then all take turns, in another order each round, so that what disturbs the machine
disturbs all alike and ratios can be taken within a round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

STAY = 2  # variants of a family that are timed at each size


class Timed(Protocol):
    """A crew, as far as a contest needs it."""

    def check(self, size: int) -> float:
        """Seconds of one collective of `size` bytes; raises where its result is wrong."""

    def time(self, size: int, repeats: int) -> float:
        """Seconds of one collective of `size` bytes, of `repeats` back to back."""


@dataclass(frozen=True)
class Entry:
    """A contestant. Those with the same `family` are variants of one, of which only the best are timed at length."""

    name: str
    crew: Timed
    family: str = ""


@dataclass(frozen=True)
class Turns:
    """What one contestant took at one size: seconds of one collective, a figure for each round (by its number)."""

    name: str
    size: int
    repeats: int
    seconds: dict[int, float]
    family: str = ""

    @property
    def median(self) -> float:
        """The median over rounds, in seconds."""
        return median(self.seconds.values())


def hold(
    entries: Sequence[Entry],
    sizes: Sequence[int],
    rounds: int,
    seconds: float,
    tell: Callable[[str], None] = lambda _: None,
) -> list[Turns]:
    """Time `entries` at `sizes` (bytes) in `rounds` turns of at least `seconds` each; `tell` hears before each turn."""
    found = []
    for size in sizes:
        trials = {}
        for entry in entries:
            tell(f"{entry.name}, {size} B, trial")
            trial = entry.crew.check(size)
            trials[entry.name] = entry.crew.time(size, 3) if trial < seconds else trial
        stay = [entry for entry in entries if entry.name in _best(entries, trials)]
        repeats = {one.name: _repeats(one.crew, size, trials[one.name], seconds) for one in stay}
        turns: dict[str, dict[int, float]] = {entry.name: {} for entry in stay}
        for at in range(rounds):
            for entry in (*stay[at % len(stay) :], *stay[: at % len(stay)]):
                tell(f"{entry.name}, {size} B, round {at + 1}")
                turns[entry.name][at] = entry.crew.time(size, repeats[entry.name])
        found += [Turns(one.name, size, repeats[one.name], turns[one.name], one.family) for one in stay]
    return found


def _repeats(crew: Timed, size: int, trial: float, seconds: float) -> int:
    """How many collectives fill a turn. A few short ones say little: they are tried until they take a tenth of it."""
    count = 1
    while count * trial < seconds / 10:
        count = max(2 * count, int(seconds / 10 / trial) + 1)
        trial = crew.time(size, count)
    return max(1, math.ceil(seconds / trial))


def _best(entries: Sequence[Entry], trials: dict[str, float]) -> set[str]:
    stay = {entry.name for entry in entries if not entry.family}
    for family in {entry.family for entry in entries if entry.family}:
        names = sorted((one.name for one in entries if one.family == family), key=trials.__getitem__)
        stay |= set(names[:STAY])
    return stay
