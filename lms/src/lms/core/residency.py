"""Which blocks of memory are on the device while a step uses one after another, and which leave or come back. Pure.

A *course* is the order in which a step uses blocks. The next step is expected to follow it again. So blocks come back
ahead of their use, and the one that is used last leaves first (Belady, "A study of replacement algorithms for a
virtual-storage computer", 1966). Without a course the one that was used longest ago leaves first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import accumulate
from typing import Generic, NamedTuple, Protocol, TypeVar

_NEVER = 1 << 62
_AHEAD = 1 / 4  # of the room: more would make blocks leave long before they have to


class Block(Protocol):
    """Memory that is used, leaves and comes back as a whole."""

    nbytes: int
    transient: bool  # its contents are freed soon after their last use of a step


B = TypeVar("B", bound=Block)


class Move(NamedTuple, Generic[B]):
    """A block comes `back` to the device, or leaves it."""

    block: B
    back: bool


class Residency(Generic[B]):
    """Keeps at most `room` bytes of all blocks on the device, or what two neighbouring uses need together.

    What its methods return is to be moved in that order.
    """

    def __init__(self) -> None:
        self.room = 0
        self.held = 0  # bytes on the device
        self._away: set[B] = set()
        self._next: dict[B, tuple[int, int]] = {}  # of a block on the device: its next use, and when it was touched
        self._queue: list[tuple[int, int, B]] = []  # these, the next to leave first, and stale entries
        self._clock = 0
        # Positions of uses are counted on from step to step.
        self._course: Sequence[Collection[B]] = ()
        self._positions: dict[B, list[int]] = {}  # in the first step
        self._sums = [0]  # bytes of the uses before each position of the first step
        self._at = -1
        self._reached = 0  # every use before this position has its blocks on the device

    def __contains__(self, block: object) -> bool:
        """Whether the block was made and not dropped, wherever it is now."""
        return block in self._next or block in self._away

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks, wherever they are."""
        return self.held + sum(block.nbytes for block in self._away)

    def keep(self, room: int) -> list[Move[B]]:
        """Keep at most `room` bytes from now on."""
        self.room = room
        return list(self._make_room(0))

    def expect(self, course: Sequence[Collection[B]]) -> None:
        """The steps from now on use these blocks, in this order."""
        self._course, self._positions = course, defaultdict(list)
        for position, blocks in enumerate(course):
            for block in blocks:
                self._positions[block].append(position)
        self._sums = [0, *accumulate(sum(block.nbytes for block in blocks) for blocks in course)]
        self._at, self._reached = -1, 0
        self._queue.clear()
        for block in sorted(self._next, key=lambda block: self._next[block][1]):
            self._touch(block)

    def make(self, block: B) -> list[Move[B]]:
        """The block is about to be made on the device, or to be written to as a whole."""
        if block in self._next:
            return []
        moves = list(self._make_room(block.nbytes))
        self._enter(block)
        return moves

    def drop(self, block: B) -> None:
        """The block's contents are freed."""
        self._away.discard(block)
        if self._next.pop(block, None) is not None:
            self.held -= block.nbytes

    def use(self, blocks: Collection[B], position: int | None) -> list[Move[B]]:
        """An operation is about to use these blocks, at this position of the course if it is known."""
        needed = dict.fromkeys(blocks)
        if position is not None:
            self._go_to(position)
            needed.update(dict.fromkeys(self._course[(self._at + 1) % len(self._course)]))
        moves = list(self._bring(needed, needed))
        moves += self._make_room(0, needed)  # the last use may have needed more than there is room for
        for block in needed:
            if block in self._next:
                self._touch(block)
        if position is not None:
            moves += self._read_ahead(needed)
        return moves

    def _go_to(self, position: int) -> None:
        """Count on to this position of this step, or of the next one if it lies behind."""
        at = max(self._at, 0)
        self._at = at + (position - at) % len(self._course)
        self._reached = max(self._reached, self._at)

    def _read_ahead(self, pinned: Collection[B]) -> Iterator[Move[B]]:
        """Bring back what is used next, while all that leaves for it is used later."""
        end = self._at + len(self._course)
        most = self._bytes_before(self._at + 1) + self.room * _AHEAD
        while self._reached < end and self._bytes_before(self._reached + 1) <= most:
            for block in self._course[self._reached % len(self._course)]:
                if block in self._away:
                    yield from self._make_room(block.nbytes, pinned, later_than=self._reached)
                    if self.held + block.nbytes > self.room:
                        return
                    self._enter(block)
                    yield Move(block, True)
            self._reached += 1

    def _bring(self, blocks: Iterable[B], pinned: Collection[B]) -> Iterator[Move[B]]:
        for block in blocks:
            if block in self._away:
                yield from self._make_room(block.nbytes, pinned)
                self._enter(block)
                yield Move(block, True)

    def _make_room(self, nbytes: int, pinned: Collection[B] = (), later_than: int = -1) -> Iterator[Move[B]]:
        """Let blocks leave that are used later than that, until there is room for `nbytes` more."""
        passed = []
        while self.held + nbytes > self.room and self._queue:
            entry = following, touched, block = heappop(self._queue)
            if self._next.get(block) != (-following, touched):
                continue
            if block in pinned:
                passed.append(entry)
            elif -following <= later_than:
                passed.append(entry)
                break
            else:
                del self._next[block]
                self._away.add(block)
                self.held -= block.nbytes
                yield Move(block, False)
        for entry in passed:
            heappush(self._queue, entry)

    def _enter(self, block: B) -> None:
        self._away.discard(block)
        self.held += block.nbytes
        self._touch(block)

    def _touch(self, block: B) -> None:
        self._clock += 1
        following = self._use_after(block, self._at)
        self._next[block] = following, self._clock
        heappush(self._queue, (-following, self._clock, block))
        if len(self._queue) > 4 * len(self._next) + 64:  # most are stale
            self._queue = [(-following, touched, block) for block, (following, touched) in self._next.items()]
            heapify(self._queue)

    def _use_after(self, block: B, at: int) -> int:
        positions = self._positions.get(block)
        if not positions:
            return _NEVER
        steps, position = divmod(at, len(self._course))
        index = bisect_right(positions, position)
        if index < len(positions):
            return steps * len(self._course) + positions[index]
        return _NEVER if block.transient else (steps + 1) * len(self._course) + positions[0]

    def _bytes_before(self, position: int) -> int:
        steps, within = divmod(position, len(self._course))
        return steps * self._sums[-1] + self._sums[within]
