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

Without a schedule a rule decides: the oldest tensor leaves first and the newest comes back first, within a budget.
Autograd works as a stack, so the oldest tensor is the one needed last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from lms.core.holdings import Holdings
from lms.core.items import DeviceFull, Item, Mover, State
from lms.core.schedule import Course, Swap

AHEAD = 4  # tensors that the rule brings back ahead of their reads

I = TypeVar("I", bound=Item)  # noqa: E741


class Stepper(Generic[I]):
    """Runs steps one after the other: it says when the items of its `holdings` leave and come back.

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
        self.holdings = Holdings(mover, changed)
        self.misses = 0
        self.made_room = 0  # reads for which others left because the device was full
        self._room = room
        self._write_ahead = write_ahead
        self._drops: list[Swap] = []  # to be dropped at the next access
        self.begin(None)

    def begin(self, course: Course | None) -> None:
        """Begin a step. It follows `course`, or the rule if there is none."""
        self.drop_due()  # the last operation of the step before is over
        self.skip_to(0, 0)
        self.items: dict[int, I] = {}  # by index; the dead ones too
        self.largest = 0
        self.holdings.held_peak = self.holdings.held
        self._course = course
        self._off_schedule = False  # the step diverged from the schedule that it began with
        self._returned = 0  # into course.returns
        self._full_with: int | None = None  # bytes held when the device had no room for a copy ahead of its read
        self._forward = True  # nothing has been read yet

    def add(self, item: I) -> None:
        """The step's next tensor: written for the first time, or there (or away) since the step before."""
        self.items[item.index] = item
        if not item.pinned:
            self.largest = max(self.largest, item.nbytes)
            if item.state is State.HERE and not item.held:
                self.holdings.hold(item)

    def require(self, item: I) -> None:
        """Make the item resident, whatever it takes: it is about to be read, or written."""
        if item.index >= 0:
            self._forward = False
        if item.state is State.LEAVING:
            self.holdings.stay(item)
        if item.state is State.AWAY:
            course = self._course
            foreseen = course is not None and (item.index, self.position) in course.on_demand
            self.misses += not foreseen
            self._make_room(self._cap() - item.nbytes, item)
            self._bring(item)
        self.holdings.arrive(item)

    # Accesses

    def skip_to(self, position: int, elsewhere: int) -> None:
        """Go on at this access. Other code takes care of tensors that hold `elsewhere` bytes by now.

        Those are none of the items, and the schedule does not move them.
        """
        self.position = position
        self.holdings.count_elsewhere(elsewhere)

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

    def drop_due(self) -> None:
        """Rule 1, for what the access before asked for."""
        due, self._drops = self._drops, []
        for move in due:
            self.holdings.send(self.items[move.tensor])

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
        if self.holdings.held > cap or course.write_ahead is not None:
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
                self.holdings.stay(comer)
            elif comer.state is State.AWAY:
                if self.holdings.left:
                    self._make_room(cap - comer.nbytes, item)
                if self.holdings.held + comer.nbytes > cap or not self._come_ahead(comer):
                    break
            self._returned += 1

    def _start(self, move: Swap) -> None:
        item = self.items[move.tensor]
        if move.stays:
            self.holdings.store(item)
        else:
            self.holdings.send(item)

    @property
    def exceeds(self) -> bool:
        """Whether more is held than was foreseen, beside what is on its way out: tensors live longer (retain_graph)."""
        course = self._course
        if course is None or not self._exceeds(course, self.position):
            return False
        return self._exceeds(course, self.position, self.holdings.going)

    def _exceeds(self, course: Course, position: int, going: int = 0) -> bool:
        most = course.most_held
        return most is not None and self.holdings.held - self.holdings.left - going > max(course.cap[position], most)

    def _by_rule(self, item: I, *, read: bool) -> None:
        budget = self._room(self.largest)
        # A tensor that the forward has just written can leave too: its operation keeps it for as long as it needs it.
        in_hand = item if read else None
        # Copies out start while some room is left, so that few are waited for.
        mark = budget - min(budget // 4, 4 * self.largest)
        while self.holdings.held - self.holdings.leaving > mark and self._evict(in_hand):
            pass
        self._make_room(budget, in_hand, ahead=self._write_ahead)
        if read:
            for index in range(item.index - 1, max(-1, item.index - 1 - AHEAD), -1):
                older = self.items[index]
                away = older.state is State.AWAY and not older.pinned
                if away and (self.holdings.held + older.nbytes > mark or not self._come_ahead(older)):
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
        holdings = self.holdings
        while holdings.held > cap or (ahead is not None and holdings.departures > ahead):
            if holdings.held > cap and holdings.finish_freed():
                continue
            if not holdings.finish_departure() and not self._evict(in_hand):
                holdings.finish_in_use()
                return

    def _evict(self, in_hand: I | None) -> bool:
        """Have the oldest item leave that can and is not in hand: the backward needs it last. Whether one did.

        A step that follows its schedule has only those leave that earlier steps left behind.
        """
        evictable = self.holdings.evictable
        order: Iterable[int]
        if self._course is not None and not self._off_schedule:
            order = [index for index in sorted(evictable) if index < 0] if self.holdings.left else ()
        else:
            # In the forward items come in the order of their indices; the backward adds those that it brought back.
            order = list(evictable) if self._forward else sorted(evictable)
        for index in order:
            victim = evictable[index]
            if victim is in_hand:
                continue
            self.holdings.send(victim)
            if victim.state in (State.LEAVING, State.AWAY):
                return True
        return False

    def _bring(self, item: I) -> None:
        """Bring back what is read now. Raises the device's error if it stays full although all left that can."""
        made_room = False
        while True:
            try:
                self.holdings.come(item)
            except DeviceFull as full:
                before, self._off_schedule = self.holdings.held, True  # from now on make room by the rule
                self._make_room(before - 1, item)
                if self.holdings.held == before and not self.holdings.await_another(item):
                    raise full.__cause__ or full from None
                made_room = True
                continue
            self.made_room += made_room
            return

    def _come_ahead(self, item: I) -> bool:
        """Start the copy back of what is read later. False if the device is full, or was while no more was held."""
        if self._full_with is not None and self.holdings.held >= self._full_with:
            return False
        try:
            self.holdings.come(item)
        except DeviceFull:
            self._full_with = self.holdings.held
            return False
        return True
