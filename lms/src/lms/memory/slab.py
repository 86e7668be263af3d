"""Which bytes of a slab are taken: offsets only, the slab itself may be memory or a file."""

from __future__ import annotations

from bisect import bisect_left

ALIGNMENT = 4096  # bytes: a page, and what O_DIRECT asks of offsets, lengths and addresses


def round_up(nbytes: int, alignment: int = ALIGNMENT) -> int:
    """The least multiple of `alignment` that is not below `nbytes`."""
    return -(-nbytes // alignment) * alignment


class Slab:
    """Extents carved out of `size` bytes: first fit, and neighbouring holes become one.

    First fit keeps the slab's end low: a file grows no further than it must, and a step that repeats the one before
    finds the same places. Not thread-safe.
    """

    def __init__(self, size: int, alignment: int = ALIGNMENT) -> None:
        self.size = size // alignment * alignment
        self.alignment = alignment
        self.used = 0  # bytes in extents, rounded up to the alignment
        self.peak = 0  # most of them so far
        self._taken: dict[int, int] = {}  # offset -> length
        self._holes = [0] if self.size else []  # offsets, ascending; no two holes touch
        self._lengths = {0: self.size} if self.size else {}

    def allocate(self, nbytes: int) -> int | None:
        """The offset of a new extent of at least `nbytes` (and never of none), or None if no hole is long enough."""
        need = round_up(max(nbytes, 1), self.alignment)
        for index, offset in enumerate(self._holes):
            length = self._lengths[offset]
            if length < need:
                continue
            del self._lengths[offset]
            if length == need:
                del self._holes[index]
            else:
                self._holes[index] = offset + need
                self._lengths[offset + need] = length - need
            self._taken[offset] = need
            self.used += need
            self.peak = max(self.peak, self.used)
            return offset
        return None

    def free(self, offset: int) -> None:
        """Give back the extent at `offset`. Raises KeyError when none starts there."""
        length = self._taken.pop(offset)
        self.used -= length
        index = bisect_left(self._holes, offset)
        if index < len(self._holes) and self._holes[index] == offset + length:
            length += self._lengths.pop(self._holes.pop(index))
        if index and self._holes[index - 1] + self._lengths[self._holes[index - 1]] == offset:
            self._lengths[self._holes[index - 1]] += length
        else:
            self._holes.insert(index, offset)
            self._lengths[offset] = length
