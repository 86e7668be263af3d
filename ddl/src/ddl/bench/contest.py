"""Who is timed, when, and for how long. Pure but for the clock, which is the crews'.

For each size every contestant first computes a sum that is known, then takes a trial turn; of each family's variants
the best few by that trial stay. Then all take turns, in another order each round, so that what disturbs the machine
disturbs all alike, nobody always comes after the same other, and ratios can be taken within a round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Protocol

STAY = 2  # variants of a family that are timed at each size
TRIAL = 0.1  # of a turn: how long a trial is by which the best of a family are chosen
MARGIN = 1.05  # of a turn's length, as a turn may be quicker than its trials


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


@dataclass(frozen=True)
class LeftOut:
    """Who was left out, from which size on in bytes (None: it never came up), and why."""

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
    """Time `entries` at `sizes` (bytes) in `rounds` turns of at least `seconds` each; `tell` hears before each turn.

    `drop` hears of an entry whose crew raised a RuntimeError, and at which size; the entry is left out from there on,
    and the contest ends where `drop` returns False. Without `drop` the error goes on to the caller.
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
    """Who comes when in round `at`, of 0 to `count` - 1: a row of Williams' square (Aust. J. Sci. Res. A 2, 1949).

    Where `count` is even, in so many rounds each comes first once, and right after each other once. Where it is odd,
    every other round goes backwards, and twice as many rounds do the same.
    """
    row = [(place + 1) // 2 if place % 2 else (count - place // 2) % count for place in range(count)]
    turned = [(place + at) % count for place in row]
    return turned[::-1] if count % 2 and at % 2 else turned


def _trial(crew: Timed, size: int, seconds: float) -> float:
    """Seconds of a collective, the first of which is checked: the best of trials up to a share of a turn."""
    first = crew.check(size)
    trial = min(first, crew.time(size, 3 if first < seconds else 1))
    return _filled(crew, size, trial, TRIAL * seconds)[1]


def _repeats(crew: Timed, size: int, trial: float, seconds: float) -> int:
    return _filled(crew, size, trial, seconds)[0]


def _filled(crew: Timed, size: int, trial: float, seconds: float) -> tuple[int, float]:
    """How many collectives take `seconds`, and how long one takes.

    By the quickest of ever longer trials, as a few of them, or disturbed ones, say little.
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
