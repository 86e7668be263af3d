"""Chooses which sizes are copied, and how often, within a time. Pure: the clock is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lms.link.series import Point, point
from lms.units import format_size

KB, MB, GB = 1 << 10, 1 << 20, 1 << 30

SIZES = tuple(4 * KB * 4**step for step in range(10))  # 4 KiB to 1 GiB, each four times the one before
# 4 KiB to 256 MiB. With wider steps MOST copies of the sizes that fit could take less time than LEAST of the next one.
QUICK_SIZES = SIZES[:-1]

WORTH = MB  # bytes of the largest copy: below it a sweep would say nothing

LEAST = 3  # copies of a size, so that there is a median that one bad copy does not decide
MOST = 31  # copies of a size: more would not move the median

_SURE = MB  # bytes up to which a size is copied when time is short
_LONG = 1.0  # seconds of a copy from which on not even then

Copy = Callable[[int], float]  # copy so many bytes once; the seconds that it took


def cut(fitting: Sequence[int], sizes: Sequence[int], why: str) -> tuple[str, ...]:
    """A note if only the `fitting` ones of `sizes` have room: larger ones would have taken more than `why`."""
    if len(fitting) == len(sizes):
        return ()
    return (f"a smaller sweep, up to {format_size(fitting[-1])}: more would have been more than {why}",)


def sweep(
    copy: Copy, sizes: Sequence[int], seconds: float, clock: Callable[[], float] | None = None
) -> tuple[Point, ...]:
    """Copy each of `sizes` (ascending) LEAST times or more, in about `seconds`; a point for each size.

    The first copy of a size warms up and does not count. If LEAST copies of a size would not fit into the
    time, that size and all larger ones are left out. Sizes up to a MB are copied in any case, as long as no copy takes
    a second, because smaller ones say little of a link. Sizes take turns, so that a disturbance is spread over all of
    them.

    Time is the `clock`'s, since a small copy may be repeated for one figure; without one it is the copies' own.
    """
    begun = clock() if clock is not None else 0.0
    spent = planned = last = own = 0.0
    chosen: list[int] = []
    times: dict[int, list[float]] = {}

    def timed(nbytes: int) -> tuple[float, float]:
        """The seconds that the copy says it took, and those that went by."""
        nonlocal spent
        before = spent
        took = copy(nbytes)
        spent = clock() - begun if clock is not None else spent + took
        return took, spent - before

    for nbytes in sizes:
        # What a copy of this size will take, as far as the one before tells: it is not tried when it cannot fit. One
        # that was repeated for its figure has taken what a larger one takes that is repeated less often.
        if nbytes > _SURE and spent + planned + (1 + LEAST) * max(last, own * nbytes / chosen[-1]) > seconds:
            break
        own, last = timed(nbytes)
        if chosen and (nbytes > _SURE or last > _LONG) and spent + planned + LEAST * last > seconds:
            break
        planned += LEAST * last
        chosen.append(nbytes)
        times[nbytes] = []
    for turn in range(MOST):
        for nbytes in chosen:
            times[nbytes].append(timed(nbytes)[0])
        if turn + 1 >= LEAST and spent * (turn + 2) / (turn + 1) > seconds:
            break
    return tuple(point(nbytes, times[nbytes]) for nbytes in chosen)
