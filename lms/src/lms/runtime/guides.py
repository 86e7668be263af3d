"""The guides that are kept: found by how a pass begins, and by how much memory is in use outside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from lms.core.budget import Budget
from lms.core.guide import Guide, Key, prefixes

MOST_GUIDES = 64  # the one that was used longest ago goes
MOST_VARIANTS = 3  # for one sequence of accesses, for different amounts of memory outside it
_BAND = 8  # reserves of the budget by which the memory outside may shrink before a plan with moves is made again
_REMEMBERED = 4096  # sequences that were seen


class Guides:
    """Holds the guides, the one used last at the end.

    *Variants* are guides for the same sequence of accesses, with different amounts of memory in use outside.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._kept: list[Guide] = []

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Guide]:
        return iter(self._kept)

    def beginning(self, keys: Iterable[Key]) -> Guide | None:
        """The guide used last of those whose passes begin with `keys`."""
        beginning = prefixes(list(keys))
        return next((guide for guide in reversed(self._kept) if guide.began_like(beginning)), None)

    def continues(self, beginnings: Sequence[int]) -> bool:
        """Whether a known pass did the accesses with these `prefixes`, and perhaps more."""
        return any(len(guide.keys) >= len(beginnings) and guide.began_like(beginnings) for guide in self._kept)

    def variants(self, found: Guide) -> list[Guide]:
        """`found` and its variants, the last used first."""
        return [guide for guide in reversed(self._kept) if guide.same(found)]

    def suited(self, found: Guide, outside: int) -> Guide | None:
        """The variant of `found` that keeps the limit with so many bytes outside, and wastes little of it."""
        budget = self._budget
        if budget.limit is None:
            return found
        for guide in self.variants(found):
            grown = outside - guide.outside
            most = max(budget.limit, guide.plan.floor + budget.reserve)
            wastes = bool(guide.plan.moves) and grown < -_BAND * budget.reserve
            if guide.plan.forecast.resident_peak + grown <= most and not wastes:
                return guide
        return None

    def use(self, guide: Guide) -> None:
        """Note that `guide` leads a pass."""
        self._kept.remove(guide)
        self._kept.append(guide)

    def add(self, new: Guide) -> None:
        """Keep a new guide. The variant, or guide, that was used longest ago makes place for it."""
        others = [guide for guide in self._kept if not guide.same(new)]
        variants = [guide for guide in self._kept if guide.same(new)]
        self._kept = [*others, *variants[1 - MOST_VARIANTS :], new][-MOST_GUIDES:]

    def has_place_for(self, first: Key) -> bool:
        """Whether a guide that is not needed may be kept, of passes that begin with this access.

        Half of the places are for passes that need a guide. Of two guides that begin alike the wrong one may lead.
        """
        return len(self._kept) < MOST_GUIDES // 2 and all(guide.keys[0] != first for guide in self._kept)


class SeenSequences:
    """Remembers which sequences of accesses came before."""

    def __init__(self) -> None:
        self.new_in_a_row = 0
        self._hashes: dict[int, None] = {}  # of whole sequences, the one seen last at the end

    def note(self, sequence: int) -> bool:
        """Whether the sequence with this hash was seen before. It is remembered."""
        known = sequence in self._hashes
        self.new_in_a_row = 0 if known else self.new_in_a_row + 1
        self._hashes.pop(sequence, None)
        self._hashes[sequence] = None
        if len(self._hashes) > _REMEMBERED:
            del self._hashes[next(iter(self._hashes))]
        return known
