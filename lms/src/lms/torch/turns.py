"""When a pass is over although some of its records are still live, because somebody keeps a graph open. Pure."""

from __future__ import annotations

MOST_TURNS = 5  # turns without an optimizer's step after which the pass is over
OLD_STEPS = 2  # steps of an optimizer after which a record that was not used counts as forgotten
OLD_BACKWARDS = 16  # backward passes after which it does, if no optimizer steps


class Turns:
    """Tells a new step from the rest of an old one while records of the old one stay live.

    A *turn* is a save outside of any backward while each live record has been used since it was saved, or is so old
    that it will not be. If an optimizer has stepped since the last use, this is where the next step begins. Without an
    optimizer it may be a second loss of the same step, so it takes several turns.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[int, int]] = {}  # record -> steps and backwards at its save; oldest save first
        self._live: set[int] = set()
        self._steps = 0
        self._backwards = 0
        self._backward = -1  # the graph task that used a record last
        self._stepped = False  # since the last use
        self._turns = 0

    def save(self, record: int) -> None:
        """The record is saved, perhaps once more."""
        self._live.add(record)
        self._waiting.pop(record, None)
        self._waiting[record] = self._steps, self._backwards

    def use(self, record: int, backward: int) -> None:
        """The backward pass of this number uses the record."""
        self._waiting.pop(record, None)
        self._stepped = False
        if backward != self._backward:
            self._backward = backward
            self._backwards += 1

    def free(self, record: int) -> None:
        """The record's last handle is gone."""
        self._live.discard(record)
        self._waiting.pop(record, None)

    def step(self) -> None:
        """An optimizer has stepped."""
        self._steps += 1
        self._stepped = True

    def over(self) -> bool:
        """Whether the pass is over now that the next save comes, outside of any backward. Counts the turn."""
        self._forget()
        if self._waiting or not self._live:
            return False
        self._turns += 1
        return self._stepped or self._turns >= MOST_TURNS

    def _forget(self) -> None:
        while self._waiting:
            record, (steps, backwards) = next(iter(self._waiting.items()))
            forgotten = (
                self._steps - steps >= OLD_STEPS if self._steps else self._backwards - backwards >= OLD_BACKWARDS
            )
            if not forgotten:
                return
            del self._waiting[record]
