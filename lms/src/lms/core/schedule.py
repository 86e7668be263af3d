"""A schedule: a list of moves, and a cap on the held bytes for each access. Steps execute it, the simulator times it.

The rules by which they are executed are `lms.core.stepper`'s.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Swap:
    """One tensor out of memory for one of the gaps between its accesses.

    A gap may go on in the next step: then `before` and `reload` count on past the last access. If `reload` is `after`,
    the tensor stays, and only its bytes are written.
    """

    tensor: int
    after: int  # the access with which the way out starts
    before: int  # the access that it must be back for; the tensor's `freed` if it need not come back
    reload: int | None  # the access with which the way back may start; None if it need not come back
    write: bool  # False: the tier below holds the bytes already (it is clean), so memory is dropped without a copy

    @property
    def stays(self) -> bool:
        """Whether the tensor stays, and only its bytes are written."""
        return self.reload == self.after


@dataclass(frozen=True)
class Schedule:
    """Moves in the order in which they start, the cap at each access, and how many copies out may be in flight."""

    moves: tuple[Swap, ...]
    cap: tuple[int, ...]
    write_ahead: int | None = None  # None: as many as fit under the cap


class Return(NamedTuple):
    """A swap's way back within one step."""

    at: int  # the access with which it may start
    before: int  # the access that needs it; past the last one if that is in the next step
    tensor: int


class Course:
    """A schedule laid out by access, to be executed. `most_held` is the most that it was predicted to hold."""

    def __init__(self, schedule: Schedule, most_held: int | None = None) -> None:
        end = len(schedule.cap)
        self.cap = schedule.cap
        self.write_ahead = schedule.write_ahead
        self.most_held = most_held
        self.starts: dict[int, list[Swap]] = defaultdict(list)  # by the access with which they start
        self.on_demand: set[tuple[int, int]] = set()  # (tensor, access): it comes back only when it is read
        self.returns: list[Return] = []  # in the order in which they may start
        self.begins_away: set[int] = set()  # tensors that are away when a step begins, since the one before
        for move in schedule.moves:
            self.starts[move.after].append(move)
            if move.reload is None or move.stays:
                continue
            laps = move.reload // end * end
            if laps:
                self.begins_away.add(move.tensor)
            if move.reload >= move.before:
                self.on_demand.add((move.tensor, move.before % end))
                continue
            self.returns.append(Return(move.reload - laps, move.before - laps, move.tensor))
            if not laps and move.before > end:  # if there was no room for it before the step's end
                self.returns.append(Return(0, move.before - end, move.tensor))
        self.returns.sort()
        self._starts = sorted(self.starts)

    def next_start(self, position: int) -> int:
        """The first access from `position` on with which a move starts; the number of accesses if none does."""
        at = bisect_left(self._starts, position)
        return self._starts[at] if at < len(self._starts) else len(self.cap)
