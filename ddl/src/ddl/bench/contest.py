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
from typing import Protocol, TypeVar

STAY = 2  # variants of a family that are timed at each size
TRIAL = 0.1  # of a turn: the length of a trial that chooses the best of a family
MARGIN = 1.05  # on a turn's length, as a turn may be quicker than its trials


class Timed(Protocol):
    """The part of a crew that a contest needs."""

    name: str
    family: str  # those with the same one are variants, of which only the best are timed at length; "": none

    def check(self, size: int) -> float:
        """Seconds of one collective of `size` bytes; raises if its result is wrong."""

    def time(self, size: int, repeats: int) -> float:
        """Seconds of one collective of `size` bytes: the mean of `repeats` back to back."""


TimedT = TypeVar("TimedT", bound=Timed)


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
    crews: Sequence[TimedT],
    sizes: Sequence[int],
    rounds: int,
    seconds: float,
    tell: Callable[[str], None] = lambda _: None,
    drop: Callable[[TimedT, int, RuntimeError], bool] | None = None,
) -> list[Turns]:
    """Time `crews` at `sizes` (bytes) in `rounds` turns of at least `seconds` each; calls `tell` before each turn.

    If a crew raises a RuntimeError, it is left out from that size on. `drop` is told, and the contest ends if it
    returns False. Without `drop` the error goes to the caller.
    """
    if len({crew.name for crew in crews}) < len(crews):
        raise ValueError(f"two crews of one name: {', '.join(crew.name for crew in crews)}")
    left = list(crews)
    found = []

    def turn(crew: TimedT, what: str, take: Callable[[], float]) -> float | None:
        tell(f"{crew.name}, {size} B, {what}")
        try:
            return take()
        except RuntimeError as error:
            if drop is None:
                raise
            left.remove(crew)
            if not drop(crew, size, error):
                left.clear()
            return None

    for size in sizes:
        trials: dict[str, float] = {}
        for crew in tuple(left):
            if crew not in left:
                break
            trial = turn(crew, "trial", partial(_trial, crew, size, seconds))
            if trial is not None:
                trials[crew.name] = trial
        stay = [crew for crew in left if crew.name in _best(left, trials)]
        repeats: dict[str, int] = {}
        for crew in stay:
            if crew in left:
                count = turn(crew, "trial", partial(_repeats, crew, size, trials[crew.name], seconds))
                repeats[crew.name] = int(count or 0)
        turns: dict[str, dict[int, float]] = {crew.name: {} for crew in stay}
        for at in range(rounds):
            for crew in (stay[place] for place in order(len(stay), at)):
                if crew in left:
                    took = turn(crew, f"round {at + 1}", partial(crew.time, size, repeats[crew.name]))
                    if took is not None:
                        turns[crew.name][at] = took
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


def _best(crews: Sequence[Timed], trials: dict[str, float]) -> set[str]:
    stay = {crew.name for crew in crews if not crew.family}
    for family in {crew.family for crew in crews if crew.family}:
        names = sorted((one.name for one in crews if one.family == family), key=trials.__getitem__)
        stay |= set(names[:STAY])
    return stay
