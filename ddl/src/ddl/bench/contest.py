"""The order and length of the timings. Pure except for the crews, which have the clock.

For each size every contestant first computes a known sum, then takes a trial turn; the best variants of each family
stay. Then all take turns, in a different order each round. So a disturbance of the machine hits all alike, no
contestant always follows the same other, and ratios can be taken within a round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Protocol

STAY = 2  # variants of a family that are timed at each size
TRIAL = 0.1  # of a turn: the length of a trial that chooses the best of a family
MARGIN = 1.05  # on a turn's length, as a turn may be quicker than its trials


class Timed(Protocol):
    """The part of a crew that a contest needs."""

    def check(self, size: int) -> float:
        """Seconds of one collective of `size` bytes; raises if its result is wrong."""

    def time(self, size: int, repeats: int) -> float:
        """Seconds of one collective of `size` bytes: the mean of `repeats` back to back."""


@dataclass(frozen=True)
class Entry:
    """A contestant. Those with the same `family` are variants; only the best of them are timed at length."""

    name: str
    crew: Timed
    family: str = ""


@dataclass(frozen=True)
class Turns:
    """The times of one contestant at one size: seconds of one collective, by the number of the round."""

    name: str
    size: int
    repeats: int
    seconds: dict[int, float]
    family: str = ""

    @property
    def median(self) -> float:
        """The median over rounds, in seconds."""
        return median(self.seconds.values())


@dataclass(frozen=True)
class LeftOut:
    """A contestant that was left out, from which size on in bytes (None: it never came up), and why."""

    name: str
    size: int | None
    why: str
    wrong: bool = False  # it computed a wrong sum


def hold(
    entries: Sequence[Entry],
    sizes: Sequence[int],
    rounds: int,
    seconds: float,
    tell: Callable[[str], None] = lambda _: None,
    drop: Callable[[Entry, int, RuntimeError], bool] | None = None,
) -> list[Turns]:
    """Time `entries` at `sizes` (bytes) in `rounds` turns of at least `seconds` each; calls `tell` before each turn.

    If a crew raises a RuntimeError, its entry is left out from that size on. `drop` is told, and the contest ends if it
    returns False. Without `drop` the error goes to the caller.
    """
    if len({entry.name for entry in entries}) < len(entries):
        raise ValueError(f"two entries of one name: {', '.join(entry.name for entry in entries)}")
    left = list(entries)
    found = []

    def turn(entry: Entry, what: str, take: Callable[[], float]) -> float | None:
        tell(f"{entry.name}, {size} B, {what}")
        try:
            return take()
        except RuntimeError as error:
            if drop is None:
                raise
            left.remove(entry)
            if not drop(entry, size, error):
                left.clear()
            return None

    for size in sizes:
        trials: dict[str, float] = {}
        for entry in tuple(left):
            if entry not in left:
                break
            trial = turn(entry, "trial", partial(_trial, entry.crew, size, seconds))
            if trial is not None:
                trials[entry.name] = trial
        stay = [entry for entry in left if entry.name in _best(left, trials)]
        repeats: dict[str, int] = {}
        for entry in stay:
            if entry in left:
                count = turn(entry, "trial", partial(_repeats, entry.crew, size, trials[entry.name], seconds))
                repeats[entry.name] = int(count or 0)
        turns: dict[str, dict[int, float]] = {entry.name: {} for entry in stay}
        for at in range(rounds):
            for entry in (stay[place] for place in order(len(stay), at)):
                if entry in left:
                    took = turn(entry, f"round {at + 1}", partial(entry.crew.time, size, repeats[entry.name]))
                    if took is not None:
                        turns[entry.name][at] = took
        found += [
            Turns(one.name, size, repeats[one.name], turns[one.name], one.family) for one in stay if turns[one.name]
        ]
    return found


def order(count: int, at: int) -> list[int]:
    """The order of 0 to `count` - 1 in round `at`: a row of Williams' square (Aust. J. Sci. Res. A 2, 1949).

    If `count` is even, each number comes first once, and directly after each other once, in `count` rounds. If it is
    odd, every other round goes backwards, and this takes twice as many rounds.
    """
    row = [(place + 1) // 2 if place % 2 else (count - place // 2) % count for place in range(count)]
    turned = [(place + at) % count for place in row]
    return turned[::-1] if count % 2 and at % 2 else turned


def _trial(crew: Timed, size: int, seconds: float) -> float:
    """Seconds of a collective: the best of trials that take a share of a turn. The first result is checked."""
    first = crew.check(size)
    trial = min(first, crew.time(size, 3 if first < seconds else 1))
    return _filled(crew, size, trial, TRIAL * seconds)[1]


def _repeats(crew: Timed, size: int, trial: float, seconds: float) -> int:
    return _filled(crew, size, trial, seconds)[0]


def _filled(crew: Timed, size: int, trial: float, seconds: float) -> tuple[int, float]:
    """The number of collectives that take `seconds`, and the seconds of one.

    Judged by the quickest of longer and longer trials, because short or disturbed ones say little.
    """
    count = 1
    while count * trial < seconds:
        count = min(8 * count, math.ceil(MARGIN * seconds / trial))
        trial = min(trial, crew.time(size, count))
    return count, trial


def _best(entries: Sequence[Entry], trials: dict[str, float]) -> set[str]:
    stay = {entry.name for entry in entries if not entry.family}
    for family in {entry.family for entry in entries if entry.family}:
        names = sorted((one.name for one in entries if one.family == family), key=trials.__getitem__)
        stay |= set(names[:STAY])
    return stay
