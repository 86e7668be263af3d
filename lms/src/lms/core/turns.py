"""When a pass is over although some of its records are still live, because a graph is kept open. Pure."""

from __future__ import annotations

from collections import deque

MOST_TURNS = 5  # turns after which the pass is over, whatever optimizers do
OLD_ROUNDS = 2  # rounds of the optimizers after which a record that was not used counts as forgotten
OLD_BACKWARDS = 64  # backward passes after which it does in any case
GONE = 64  # steps of one other optimizer after which an optimizer has done its work
WARM_UP = 8  # steps until all optimizers that take turns are taken to be known


class Rounds:
    """Counts how often every optimizer of a training has stepped: a GAN's step is one of each model, or more of one."""

    def __init__(self) -> None:
        self.count = 0
        self._latest: dict[int, deque[int]] = {}  # for each optimizer at work the numbers of its latest steps
        self._stepped: set[int] = set()  # in the round under way
        self._steps = 0

    def step(self, optimizer: int) -> None:
        """The optimizer with this number has stepped."""
        self._steps += 1
        latest = self._latest.setdefault(optimizer, deque(maxlen=GONE + 1))
        latest.append(self._steps)
        if len(latest) > GONE and self._steps % GONE == 0:
            self._latest = {one: steps for one, steps in self._latest.items() if steps[-1] >= latest[0]}
        self._stepped.add(optimizer)
        if self._stepped >= self._latest.keys():
            self._stepped.clear()
            self.count += self._steps > WARM_UP


class Turns:
    """Tells a new step from the rest of an old one while records of the old one stay live.

    A *turn* is a save outside of any backward while each live record has been used since it was saved, or is so old
    that it will not be. If each optimizer has stepped since the last access, the next step begins here. If
    not, it may be another loss of the same step, so it takes several turns.
    """

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._waiting: dict[int, tuple[int, int]] = {}  # record -> rounds and backwards at its save; oldest save first
        self._live: set[int] = set()
        self._round = 0  # at the last save
        self._backwards = 0
        self._backward = -1  # the graph task that used a record last
        self._turns = 0

    def save(self, record: int) -> None:
        """The record is saved, perhaps once more."""
        self._live.add(record)
        self._waiting.pop(record, None)
        self._waiting[record] = self._rounds.count, self._backwards
        self._round = self._rounds.count

    def use(self, record: int, backward: int) -> None:
        """The backward pass of this number uses the record."""
        self._waiting.pop(record, None)
        if backward != self._backward:
            self._backward = backward
            self._backwards += 1

    def free(self, record: int) -> None:
        """The record's last handle is gone."""
        self._live.discard(record)
        self._waiting.pop(record, None)

    def take_turn(self) -> bool:
        """Count a turn if the save that comes now, outside of any backward, is one; whether the pass is over."""
        self._forget()
        if self._waiting or not self._live:
            return False
        self._turns += 1
        return self._rounds.count > self._round or self._turns >= MOST_TURNS

    def _forget(self) -> None:
        while self._waiting:
            record, (rounds, backwards) = next(iter(self._waiting.items()))
            if self._rounds.count - rounds < OLD_ROUNDS and self._backwards - backwards < OLD_BACKWARDS:
                return
            del self._waiting[record]
