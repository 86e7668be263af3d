"""The rules of a step: which tensors are on the device, which leave, which come back. Pure; a mover carries them out.

The simulator and a training run the same stepper, one with a mover that keeps a clock, the other with one that copies.

At each access, after the computation that led to it:

1. Copies that are complete are settled: the memory of tensors that left is free. Drops that the access before asked for
   take effect, because its operation is over now.
2. A read brings its tensor back. If no one has started that (a miss, unless it was planned), it starts now, behind as
   many copies out as it takes to make room. A read of a tensor that is leaving keeps it.
3. Moves of the schedule that start with this access start. If the tensor is to stay, only its copy out starts.
4. While more than the cap is held, the oldest copy out is waited for.
5. Copies back that may start do, in the schedule's order, as long as they fit under the cap. A tensor that
   has not left yet simply stays.

The device may have no memory for a copy back although the cap allows it: others use it, too. A copy ahead of its read
is then left for later. For one that is read now others leave, one after the other, until it fits.

*Held* are the bytes of tensors that LMS keeps on the device, copies in flight included. A tensor is *clean* if the tier
below holds its bytes too: its memory can be dropped without a copy.

Without a schedule a rule decides: the oldest tensor leaves first and the newest comes back first, within a budget.
Autograd works as a stack, so the oldest tensor is the one needed last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Generic, Literal, TypeVar

from lms.core.items import DeviceFull, Item, Mover, State
from lms.core.schedule import Course, Swap
from lms.errors import SpillError, afresh

AHEAD = 4  # tensors that the rule brings back ahead of their reads


I = TypeVar("I", bound=Item)  # noqa: E741


class Stepper(Generic[I]):
    """Runs steps one after the other.

    `room` gives the bytes that may stay in a step without a schedule. `changed` is called when the held bytes change.
    """

    def __init__(
        self,
        mover: Mover[I],
        *,
        room: Callable[[int], int],
        write_ahead: int | None = None,
        changed: Callable[[], None] | None = None,
    ) -> None:
        self.mover = mover
        self.held = 0
        self.held_peak = 0
        self.left = 0  # held bytes of items that outlived their step
        self.elsewhere = 0  # held bytes of tensors that are no items: other code takes care of them
        self.misses = 0
        self.made_room = 0  # reads for which others left because the device was full
        self.evictable: dict[int, I] = {}  # by index: held, not pinned, and not on their way
        self._room = room
        self._write_ahead = write_ahead
        self._changed = changed
        self._drops: list[Swap] = []  # to be dropped at the next access
        self.begin(None)
        self._behind = 0  # the least index so far
        self._leaving: deque[I] = deque()  # oldest first
        # Others with a copy in flight: they stay or came back into use during their copy out, or were freed during any.
        self._copied: list[I] = []

    def begin(self, course: Course | None) -> None:
        """Begin a step. It follows `course`, or the rule if there is none."""
        self.drop_due()  # the last operation of the step before is over
        self.skip_to(0, 0)
        self.items: dict[int, I] = {}  # by index; the dead ones too
        self.largest = 0
        self.held_peak = self.held
        self._course = course
        self._off_schedule = False  # the step diverged from the schedule that it began with
        self._returned = 0  # into course.returns
        self._full_with: int | None = None  # bytes held when the device had no room for a copy ahead of its read
        self._forward = True  # nothing has been read yet

    @property
    def leaving(self) -> int:
        """Bytes on their way out that will be free once they have arrived."""
        return sum(item.nbytes for item in self._leaving if item.state is State.LEAVING)

    # Tensors

    def add(self, item: I) -> None:
        """The step's next tensor: written for the first time, or there (or away) since the step before."""
        self.items[item.index] = item
        if not item.pinned:
            self.largest = max(self.largest, item.nbytes)
            if item.state is State.HERE and not item.held:
                self._hold(item)

    def write(self, item: I) -> None:
        """The bytes of the item, which is here, change: a copy of the old ones is worth nothing."""
        if item.departure is not None:
            with suppress(SpillError):  # no one needs what may have failed
                self._finish(item)
        if item.stored:
            self.mover.discard(item)
            item.stored = False

    def require(self, item: I) -> None:
        """Make the item resident, whatever it takes: it is about to be read, or written."""
        if item.index >= 0:
            self._forward = False
        if item.state is State.LEAVING:
            self._stay(item)
        if item.state is State.AWAY:
            course = self._course
            foreseen = course is not None and (item.index, self.position) in course.on_demand
            self.misses += not foreseen
            self._make_room(self._cap() - item.nbytes, item)
            self._bring(item)
        if item.arrival is not None:
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

    # Accesses

    def skip_to(self, position: int, elsewhere: int) -> None:
        """Go on at this access. Other code takes care of tensors that hold `elsewhere` bytes by now.

        Those are none of the items, and the schedule does not move them.
        """
        self.position = position
        self.held += elsewhere - self.elsewhere
        self.elsewhere = elsewhere
        self.held_peak = max(self.held_peak, self.held)

    @property
    def own(self) -> int:
        """Held bytes of the items."""
        return self.held - self.elsewhere

    @property
    def next_due(self) -> int:
        """The access up to which the stepper need not be called, unless more than the cap is held.

        What copies out have freed by then is settled later, so that more is held meanwhile than there need be.
        """
        course = self._course
        assert course is not None
        if self._drops:
            return self.position
        due = course.next_start(self.position)
        return min(due, course.returns[self._returned].at) if self._returned < len(course.returns) else due

    def settle(self) -> None:
        """Rule 1. Raises the error of a copy out that failed."""
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

    def drop_due(self) -> None:
        """Rule 1, for what the access before asked for."""
        due, self._drops = self._drops, []
        for move in due:
            self._send(self.items[move.tensor])

    def access(self, item: I | None, *, read: bool) -> None:
        """Rules 3 to 5, with `item` in hand; with none if other code takes care of it."""
        course, position = self._course, self.position
        self.position += 1
        if course is None:
            assert item is not None
            self._by_rule(item, read=read)
        else:
            self._by_schedule(course, position, item)

    def divert(self, course: Course | None) -> None:
        """The step is another than its schedule was made for: follow this one, which began alike, or the rule."""
        self._course = course
        self._off_schedule = True
        self._returned = 0
        if course is not None:
            for earlier in range(self.position):
                for move in course.starts.get(earlier, ()):
                    self._start(move)

    def _by_schedule(self, course: Course, position: int, item: I | None) -> None:
        for move in course.starts.get(position, ()):
            if move.write:
                self._start(move)
            else:
                self._drops.append(move)
        cap = course.cap[position]
        if self.held > cap or course.write_ahead is not None:
            self._make_room(cap, item, ahead=course.write_ahead)
        if self._exceeds(course, position):  # although no copy out is under way any more
            self._off_schedule = True  # make room by the rule
            self._make_room(cap, item)
        returns = course.returns
        while self._returned < len(returns) and returns[self._returned].at <= position:
            back = returns[self._returned]
            comer = self.items[back.tensor]
            if back.before <= position:
                pass  # its access brought it; if it is leaving or away, that is for the next gap
            elif comer.state is State.LEAVING:
                self._stay(comer)
            elif comer.state is State.AWAY:
                if self.left:
                    self._make_room(cap - comer.nbytes, item)
                if self.held + comer.nbytes > cap or not self._come_ahead(comer):
                    break
            self._returned += 1

    @property
    def exceeds(self) -> bool:
        """Whether more is held than was foreseen, beside what is on its way out: tensors live longer (retain_graph)."""
        course = self._course
        if course is None or not self._exceeds(course, self.position):
            return False
        going = (item for item in (*self._leaving, *self._copied) if item.state in (State.LEAVING, State.DEAD))
        return self._exceeds(course, self.position, sum(item.held for item in going if item.index >= 0))

    def _exceeds(self, course: Course, position: int, going: int = 0) -> bool:
        most = course.most_held
        return most is not None and self.held - self.left - going > max(course.cap[position], most)

    def _by_rule(self, item: I, *, read: bool) -> None:
        budget = self._room(self.largest)
        # A tensor that the forward has just written can leave too: its operation keeps it for as long as it needs it.
        in_hand = item if read else None
        # Copies out start while some room is left, so that few are waited for.
        mark = budget - min(budget // 4, 4 * self.largest)
        while self.held - self.leaving > mark and self._evict(in_hand):
            pass
        self._make_room(budget, in_hand, ahead=self._write_ahead)
        if read:
            for index in range(item.index - 1, max(-1, item.index - 1 - AHEAD), -1):
                older = self.items[index]
                away = older.state is State.AWAY and not older.pinned
                if away and (self.held + older.nbytes > mark or not self._come_ahead(older)):
                    return

    # Room

    def _cap(self) -> int:
        course = self._course
        if course is None:
            return self._room(self.largest)
        return course.cap[min(self.position, len(course.cap) - 1)]

    def _make_room(self, cap: int, in_hand: I | None, ahead: int | None = None) -> None:
        """Rule 4: wait for copies, of freed items and out of others, oldest first, until at most `cap` bytes are held.

        If none is under way, evict. If nothing can be evicted, that is all the room there is now. At most `ahead`
        copies out of what leaves stay in flight.
        """
        while self.held > cap or (ahead is not None and len(self._leaving) > ahead):
            dead = next((one for one in self._copied if one.state is State.DEAD), None) if self.held > cap else None
            if dead is not None:
                self._finish(dead)
            elif self._leaving:
                self._wait(self._leaving[0], "out")
                self._complete(self._leaving.popleft())
            elif not self._evict(in_hand):
                for item in list(self._copied):  # in use: their memory must be free as soon as they are not
                    self._finish(item)
                return

    def _evict(self, in_hand: I | None) -> bool:
        """Have the oldest item leave that can and is not in hand: the backward needs it last. Whether one did.

        A step that follows its schedule has only those leave that earlier steps left behind.
        """
        evictable = self.evictable
        order: Iterable[int]
        if self._course is not None and not self._off_schedule:
            order = [index for index in sorted(evictable) if index < 0] if self.left else ()
        else:
            # In the forward items come in the order of their indices; the backward adds those that it brought back.
            order = list(evictable) if self._forward else sorted(evictable)
        for index in order:
            victim = evictable[index]
            if victim is in_hand:
                continue
            self._send(victim)
            if victim.state in (State.LEAVING, State.AWAY):
                return True
        return False

    def _bring(self, item: I) -> None:
        """Bring back what is read now. Raises the device's error if it stays full although all left that can."""
        made_room = False
        while True:
            try:
                self._come(item)
            except DeviceFull as full:
                before, self._off_schedule = self.held, True  # from now on make room by the rule
                self._make_room(before - 1, item)
                if self.held == before and not self._await_another(item):
                    raise full.__cause__ or full from None
                made_room = True
                continue
            self.made_room += made_room
            return

    def _await_another(self, item: I) -> bool:
        """Block until another item that is on its way back is here, and so can leave. False if there is none."""
        for one in self.evictable.values():
            if one is not item and one.state is State.COMING and one.arrival is not None and not one.arrival.done():
                with suppress(SpillError):
                    one.arrival.synchronize()
                return True
        return False

    def _come_ahead(self, item: I) -> bool:
        """Start the copy back of what is read later. False if the device is full, or was while no more was held."""
        if self._full_with is not None and self.held >= self._full_with:
            return False
        try:
            self._come(item)
        except DeviceFull:
            self._full_with = self.held
            return False
        return True

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

    # Ways of an item

    def _start(self, move: Swap) -> None:
        item = self.items[move.tensor]
        if not move.stays:
            self._send(item)
        elif item.state is State.HERE and not item.pinned and not item.stored and self._copy_out(item):
            self._copied.append(item)

    def _send(self, item: I) -> None:
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

    def _stay(self, item: I) -> None:
        """An item that was leaving stays; its copy out goes on, so that it can be dropped later."""
        item.state = State.HERE
        self._leaving.remove(item)
        self._copied.append(item)
        self.evictable[item.index] = item

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

    def _drop(self, item: I) -> None:
        self.mover.release(item)
        item.state = State.AWAY
        self._unhold(item)

    def _come(self, item: I) -> None:
        item.arrival = self.mover.reload(item)
        item.state = State.HERE if item.arrival is None else State.COMING
        self._hold(item)

    def _bury(self, item: I) -> None:
        item.arrival = None
        self.mover.forget(item)
        self._unhold(item)

    def _hold(self, item: I) -> None:
        item.held = item.nbytes
        self.held += item.nbytes
        if item.index < 0:
            self.left += item.nbytes
        if self.held > self.held_peak:
            self.held_peak = self.held
        self.evictable[item.index] = item
        if self._changed is not None:
            self._changed()

    def _unhold(self, item: I) -> None:
        had, item.held = item.held, 0
        self.held -= had
        if item.index < 0:
            self.left -= had
        if self.evictable.get(item.index) is item:  # else the next step has another of this index already
            del self.evictable[item.index]
        if had and self._changed is not None:
            self._changed()
