"""An optimizer's state that is on the device for a while: it leaves after its step, or is back before it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from lms.core.items import Guests
from lms.errors import LMSError


class Lingering(Protocol):
    """A tensor of the state that stands below the device, and whose bytes may be on the device as well."""

    nbytes: int

    def left(self) -> bool:
        """Whether its copy out is over. Never blocks."""

    def come(self) -> None:
        """Start its copy back. Raises what the engine raises."""
        return None

    def leave(self) -> None:
        """Have the computation wait for its copy, and free its memory."""
        return None


class StateGuests(Guests):
    """The stepper's guests. Called under the swapper's lock, or while no pass is under way.

    `order` gives what is away in the order in which it will be needed, and `room` the bytes that the time after the
    pass leaves for it.
    """

    def __init__(self, order: Callable[[], Iterable[Lingering]]) -> None:
        self.nbytes = 0
        self.room: Callable[[], int] = lambda: 0
        self._order = order
        self._leaving: dict[Lingering, None] = {}  # the first to leave first
        self._here: dict[Lingering, None] = {}  # back, or on their way back: the first that is needed first
        self._next: deque[Lingering] | None = None  # what may come in this pass

    def linger(self, one: Lingering) -> None:
        """Count what has begun to leave."""
        self._leaving[one] = None
        self.nbytes += one.nbytes

    def arrive(self, one: Lingering) -> None:
        """Count what has begun to come back before its use."""
        self._here[one] = None
        self.nbytes += one.nbytes

    def forget(self, one: Lingering) -> None:
        """It is in use, and no guest any more, if it was one."""
        if one in self._leaving:
            del self._leaving[one]
        elif one in self._here:
            del self._here[one]
        else:
            return
        self.nbytes -= one.nbytes

    def begin(self) -> None:
        """A pass begins."""
        self.settle()
        self._next = None

    def settle(self) -> None:
        """Free the memory of those that have left."""
        while self._leaving and (one := next(iter(self._leaving))).left():
            self._leave(one)

    def shrink(self) -> bool:
        """Have the computation wait for the one that left first; if none leaves, drop the one that is needed last."""
        if not self._leaving and not self._here:
            return False
        if self._leaving:
            self._leave(next(iter(self._leaving)))
        else:
            self._leave(next(reversed(self._here)))
            self._next = deque()  # there is less room than was thought
        return True

    def let_leave(self, most: int) -> None:
        """Have the computation wait until of those that leave so many are gone that at most `most` bytes are here."""
        while self._leaving and self.nbytes > most:
            self._leave(next(iter(self._leaving)))

    def come(self, most: int) -> None:
        """Start copies back, in order, up to `most` bytes on the device."""
        if self._next is None:
            self._next = deque(self._order() if self.room() > 0 else ())
        if not self._next:
            return
        most = min(most, self.room())
        coming = self._next
        while coming:
            one = coming[0]
            new = one not in self._leaving and one not in self._here
            if self.nbytes + new * one.nbytes > most:
                return
            coming.popleft()
            if new:
                try:
                    one.come()
                except (LMSError, torch.OutOfMemoryError):  # the step tries again, and raises it
                    coming.clear()
                    return
                self.arrive(one)
            elif one in self._leaving:  # it stays
                del self._leaving[one]
                self._here[one] = None

    def _leave(self, one: Lingering) -> None:
        self.forget(one)
        one.leave()
