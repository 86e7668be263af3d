"""What the device holds: the items of a step and their copies in flight. Pure; a mover carries the copies out.

*Held* are the bytes of tensors that LMS keeps on the device, copies in flight included. A tensor is *clean* if the tier
below holds its bytes too: its memory can be dropped without a copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, Literal, TypeVar

from lms.core.items import Item, Mover, State
from lms.errors import SpillError, afresh

I = TypeVar("I", bound=Item)  # noqa: E741


class Holdings(Generic[I]):
    """Takes items from state to state, and counts what they hold. `lms.core.stepper` says when.

    `changed` is called when the held bytes change.
    """

    def __init__(self, mover: Mover[I], changed: Callable[[], None] | None = None) -> None:
        self.mover = mover
        self.held = 0
        self.held_peak = 0
        self.left = 0  # held bytes of items that outlived their step
        self.elsewhere = 0  # held bytes of tensors that are no items: other code takes care of them
        self.evictable: dict[int, I] = {}  # by index: held, not pinned, and not on their way
        self._changed = changed
        self._behind = 0  # the least index so far
        self._leaving: deque[I] = deque()  # oldest first
        # Others with a copy in flight: they stay or came back into use during their copy out, or were freed during any.
        self._copied: list[I] = []

    @property
    def own(self) -> int:
        """Held bytes of the items."""
        return self.held - self.elsewhere

    @property
    def leaving(self) -> int:
        """Bytes on their way out that will be free once they have arrived."""
        return sum(item.nbytes for item in self._leaving if item.state is State.LEAVING)

    @property
    def departures(self) -> int:
        """Copies out in flight whose items leave."""
        return len(self._leaving)

    @property
    def going(self) -> int:
        """Held bytes of this step's items that are free once the copies in flight are complete."""
        going = (item for item in (*self._leaving, *self._copied) if item.state in (State.LEAVING, State.DEAD))
        return sum(item.held for item in going if item.index >= 0)

    def count_elsewhere(self, nbytes: int) -> None:
        """Other code takes care of tensors that hold so many bytes by now."""
        self.held += nbytes - self.elsewhere
        self.elsewhere = nbytes
        self.held_peak = max(self.held_peak, self.held)

    # The ways of an item

    def hold(self, item: I) -> None:
        """The item's bytes are on the device, or about to be."""
        item.held = item.nbytes
        self.held += item.nbytes
        if item.index < 0:
            self.left += item.nbytes
        if self.held > self.held_peak:
            self.held_peak = self.held
        self.evictable[item.index] = item
        if self._changed is not None:
            self._changed()

    def write(self, item: I) -> None:
        """The bytes of the item, which is here, change: a copy of the old ones is worth nothing."""
        if item.departure is not None:
            with suppress(SpillError):  # no one needs what may have failed
                self._finish(item)
        if item.stored:
            self.mover.discard(item)
            item.stored = False

    def store(self, item: I) -> None:
        """Start the copy out of an item that stays, unless there is one."""
        if item.state is State.HERE and not item.pinned and not item.stored and self._copy_out(item):
            self._copied.append(item)

    def send(self, item: I) -> None:
        """Have an item leave: at once if it is clean, else by a copy out."""
        arrival = item.arrival
        if item.state is State.COMING and arrival is not None and arrival.done() and arrival.failed is None:
            item.arrival, item.state = None, State.HERE  # it was brought ahead, and no one has read it
        if item.state is not State.HERE or item.pinned:
            return
        if item.departure is not None:
            self._copied.remove(item)
            self._leave(item)
        elif item.stored:
            self._drop(item)
        elif self._copy_out(item):
            self._leave(item)

    def stay(self, item: I) -> None:
        """An item that was leaving stays; its copy out goes on, so that it can be dropped later."""
        item.state = State.HERE
        self._leaving.remove(item)
        self._copied.append(item)
        self.evictable[item.index] = item

    def come(self, item: I) -> None:
        """Start the copy back of an item that is away. Raises DeviceFull, and nothing has begun then."""
        item.arrival = self.mover.reload(item)
        item.state = State.HERE if item.arrival is None else State.COMING
        self.hold(item)

    def arrive(self, item: I) -> None:
        """Have the computation wait for the item's copy back, if there is one. Raises its error if it failed."""
        if item.arrival is None:
            return
        self.mover.wait(item, "back")
        # On a GPU each stream that reads it has to wait, so the copy is kept until it is known to be complete.
        if item.arrival.done():
            item.arrival = None
        item.state = State.HERE

    def free(self, item: I) -> None:
        """The item's last access is over."""
        if item.stored:
            self.mover.discard(item)
            item.stored = False
        self.evictable.pop(item.index, None)
        coming, item.state = item.state is State.COMING, State.DEAD
        if coming:
            self._copied.append(item)  # its memory is being written to
        elif item.departure is None:
            self._bury(item)

    def leave_behind(self, item: I) -> None:
        """The item's step is over, and the item is not. It is the first to leave from now on."""
        evictable = self.evictable.pop(item.index, None)
        self._behind -= 1
        item.index = self._behind
        self.left += item.held
        if evictable is not None:
            self.evictable[item.index] = item

    # Copies in flight

    def settle(self) -> None:
        """Free the memory behind the copies that are complete. Raises the error of a copy out that failed."""
        while self._leaving:
            departure = self._leaving[0].departure
            assert departure is not None
            if not departure.done():
                break
            self._complete(self._leaving.popleft())
        if self._copied:
            for item in [one for one in self._copied if (copy := one.departure or one.arrival) is None or copy.done()]:
                self._copied.remove(item)
                self._complete(item)

    def finish_freed(self) -> bool:
        """Wait for the oldest copy of a freed item. False if there is none."""
        dead = next((item for item in self._copied if item.state is State.DEAD), None)
        if dead is not None:
            self._finish(dead)
        return dead is not None

    def finish_departure(self) -> bool:
        """Wait for the oldest copy out whose item leaves. False if there is none."""
        if not self._leaving:
            return False
        self._wait(self._leaving[0], "out")
        self._complete(self._leaving.popleft())
        return True

    def finish_in_use(self) -> None:
        """Wait for the copies of items in use: their memory must be free as soon as they are not."""
        for item in list(self._copied):
            self._finish(item)

    def await_another(self, item: I) -> bool:
        """Block until another item that is on its way back is here, and so can leave. False if there is none."""
        for one in self.evictable.values():
            if one is not item and one.state is State.COMING and one.arrival is not None and not one.arrival.done():
                with suppress(SpillError):
                    one.arrival.synchronize()
                return True
        return False

    def give_up(self) -> None:
        """Wait for all that is in flight. A copy out that failed has lost nothing that is needed."""
        for item in [*self._leaving, *self._copied]:
            copy = item.departure or item.arrival
            if copy is not None:
                with suppress(SpillError):
                    copy.synchronize()
        while self._leaving or self._copied:
            with suppress(SpillError):
                self.settle()

    def _finish(self, item: I) -> None:
        """Wait for the item's copy, which is not one of those that leave."""
        if item.departure is not None:
            self._wait(item, "out")
        elif item.arrival is not None:
            self._wait(item, "back")
        self._copied.remove(item)
        self._complete(item)

    def _wait(self, item: I, lane: Literal["out", "back"]) -> None:
        """Wait for a copy. Its error, if it failed, is dealt with later."""
        with suppress(SpillError):
            self.mover.wait(item, lane)

    def _complete(self, item: I) -> None:
        """The item's copy out is complete; or its copy back, after it was freed."""
        copy, item.departure = item.departure, None
        if item.state is State.DEAD or copy is None:
            self._bury(item)  # no one needs what may have failed
            return
        if item.state is State.LEAVING:
            item.state = State.HERE
            self.evictable[item.index] = item
            if copy.failed is None:
                self._drop(item)
        if copy.failed is not None:
            self.mover.discard(item)
            item.stored = False
            raise afresh(copy.failed)

    # Parts of these

    def _copy_out(self, item: I) -> bool:
        """Start the item's copy out. False if it must stay."""
        copy = self.mover.offload(item)
        if copy is None:
            return False
        item.departure, item.stored = copy, True
        return True

    def _leave(self, item: I) -> None:
        item.state = State.LEAVING
        self._leaving.append(item)
        self.evictable.pop(item.index, None)

    def _drop(self, item: I) -> None:
        self.mover.release(item)
        item.state = State.AWAY
        self._unhold(item)

    def _bury(self, item: I) -> None:
        item.arrival = None
        self.mover.forget(item)
        self._unhold(item)

    def _unhold(self, item: I) -> None:
        had, item.held = item.held, 0
        self.held -= had
        if item.index < 0:
            self.left -= had
        if self.evictable.get(item.index) is item:  # else the next step has another of this index already
            del self.evictable[item.index]
        if had and self._changed is not None:
            self._changed()
