"""Times of copies of several sizes: median and spread at each size, and the rate and latency of all together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Annotated, Literal, get_args

from lms.documents import MOST_SECONDS, Rate, Some

# out: from the device to the tier below it (a GPU to its host, memory to a file, one host to another). back: the other
# way. both: the two at once. copy: within one memory.
Direction = Literal["out", "back", "both", "copy"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)

SHORTEST = 1e-12  # seconds of a copy in a document
Took = Annotated[float, (SHORTEST, MOST_SECONDS)]
_SUSTAINED = 16  # sizes from this part of the largest on count for the rate


@dataclass(frozen=True)
class Point:
    """Copies of one size. `low` and `high` are the quartiles: half of the copies took a time between them."""

    nbytes: Some  # that one copy moves; with `both`, the two ways together
    seconds: Took  # median
    low: Took
    high: Took
    count: Some

    @property
    def rate(self) -> float:
        """Bytes a second of the median copy."""
        return self.nbytes / self.seconds


def point(nbytes: int, seconds: Sequence[float]) -> Point:
    """The copies of `nbytes` that took `seconds` each."""
    low, _, high = quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else (seconds[0],) * 3
    return Point(nbytes, median(seconds), low, high, len(seconds))


@dataclass(frozen=True)
class Series:
    """One way over a link, by one means, at several sizes.

    A described link has no points, and its rate is the nominal one.
    """

    direction: Direction
    via: str  # by which means: pinned, pageable, O_DIRECT, 1 thread
    rate: Rate  # bytes a second, sustained
    latency: float  # seconds that a copy takes beyond its bytes
    points: tuple[Point, ...] = ()  # sizes ascending

    @classmethod
    def of(cls, direction: Direction, via: str, points: Sequence[Point], least: int = 0) -> Series:
        """A series from `points`, sizes ascending; at least one must be of `least` bytes or more.

        The rate is that of the large copies together, so that neither one disturbed size nor the burst that a throttled
        disk lets pass decides it. Copies below `least` do not count for it. The latency is what the
        smallest copy took beyond its bytes.
        """
        large = [one for one in points if one.nbytes >= max(points[-1].nbytes / _SUSTAINED, least)]
        rate = sum(one.nbytes for one in large) / sum(one.seconds for one in large)
        return cls(direction, via, rate, max(0.0, points[0].seconds - points[0].nbytes / rate), tuple(points))

    @property
    def spread(self) -> float:
        """The spread of the copies of the largest size: half the distance of their quartiles, over the median."""
        if not self.points:
            return 0.0
        last = self.points[-1]
        return (last.high - last.low) / 2 / last.seconds
