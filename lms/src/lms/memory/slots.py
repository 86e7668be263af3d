"""Slots: the place of one tensor's bytes in a tier, and how long it is used."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar


class Slot:
    """Where the bytes of one tensor went. Opaque but for its size."""

    __slots__ = ("dropped", "nbytes", "users")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.users = 1  # the caller, until it discards the slot, and each copy until it ends
        self.dropped = False


S = TypeVar("S", bound=Slot)


class Ledger(Generic[S]):
    """Counts the users of slots, and has a slot freed when the last of them has left.

    The garbage collector may run in the middle of any of an engine's methods and end in a discard: then the lock is
    taken, by that very thread, and the tier half changed. So who left is noted without the lock, and counted by the
    thread that has it next.

    `free` gives a slot's room back; it is called with the lock. It must not hold the ledger's owner, which would then
    outlive its last reference.
    """

    def __init__(self, free: Callable[[S], None]) -> None:
        self.lock = threading.Lock()  # guards the tier and the slots' users; never held over a copy
        self._free = free
        self._left: deque[S] = deque()  # a slot for each user that left it and was not yet counted

    def use(self, slot: S) -> None:
        """One user more. Called with the lock. Raises ValueError for a slot that was discarded."""
        if slot.dropped:
            raise ValueError("the slot was discarded: its bytes may be another's by now")
        slot.users += 1

    def leave(self, slot: S) -> None:
        """One user less. Never blocks; may come from any thread, and from inside the lock."""
        self._left.append(slot)
        self.settle()

    def drop(self, slot: S) -> None:
        """The caller leaves, and no further use may begin. Idempotent; else as `leave`."""
        if not slot.dropped:
            slot.dropped = True
            self.leave(slot)

    def settle(self, first: Callable[[], None] | None = None) -> None:
        """Count who left, after a call of `first`. If another thread has the lock, the next one counts."""
        if self.lock.acquire(blocking=False):
            try:
                if first is not None:
                    first()
                self.count()
            finally:
                self.lock.release()

    def count(self) -> None:
        """Count who left. Called with the lock."""
        while self._left:
            slot = self._left.popleft()
            slot.users -= 1
            if not slot.users:
                self._free(slot)
