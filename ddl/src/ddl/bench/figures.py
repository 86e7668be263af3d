"""What the times mean: bandwidths, shares of the bound, ratios. Pure.

- algorithm bandwidth: bytes of the buffer over the time
- bus bandwidth: 2 (n - 1) / n x algorithm bandwidth: what each rank's link carries at least, so that it can be compared
  with a link's rate whatever the number of ranks (the definition of nccl-tests)
- bound: the least time that any algorithm can take on the network that was described (`ddl_bounds.cut`)
- ratio to DDL: the median over rounds of the other's time over DDL's of the same round
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from statistics import median

from ddl.bench.contest import Turns
from ddl.planning.units import format_bytes, format_size, format_time

Bound = Callable[[int], float]  # bytes of the buffer -> seconds


def bus_bandwidth(ranks: int, size: int, seconds: float) -> float:
    """Bytes a second; see above."""
    return 2 * (ranks - 1) / ranks * size / seconds


def ratios(other: Turns, base: Turns) -> list[float]:
    """The other's time over the base's, round by round."""
    return [seconds / base.seconds[at] for at, seconds in other.seconds.items() if at in base.seconds]


def spread(turns: Turns) -> float:
    """How far a contestant is from itself: half the range of its rounds over their median, without the two ends."""
    values = sorted(turns.seconds.values())
    inner = values[1:-1] if len(values) > 4 else values
    return (inner[-1] - inner[0]) / 2 / turns.median if inner else inf


def table(turns: Sequence[Turns], ranks: int, base: str, bound: Bound | None = None) -> str:
    """A line for each size and contestant: time, bandwidths, share of the bound, ratio to `base`."""
    names = list(dict.fromkeys(one.name for one in turns))
    width = max(map(len, names))
    head = f"{'size':>9}  {'':<{width}}  {'time':>10}  {'algorithm':>12}  {'bus':>12}"
    head += "  bound/time" if bound else ""
    lines = [head + (f"  x {base}'s time" if len(names) > 1 else "")]
    for size in dict.fromkeys(one.size for one in turns):
        here = {one.name: one for one in turns if one.size == size}
        for name, one in sorted(here.items(), key=lambda pair: pair[1].median):
            line = f"{format_size(size):>9}  {name:<{width}}  {format_time(one.median):>10}"
            line += f"  {format_bytes(size / one.median):>12}"
            line += f"  {format_bytes(bus_bandwidth(ranks, size, one.median)):>12}"
            line += f"  {bound(size) / one.median:>10.0%}" if bound else ""
            if len(names) > 1 and base in here:
                line += f"  {median(ratios(one, here[base])):.2f} (± {spread(one):.0%})"
            lines.append(line)
    return "\n".join(lines)


def to_json(turns: Sequence[Turns]) -> list[Mapping[str, object]]:
    """The figures as they were measured."""
    return [
        {
            "contestant": one.name,
            "bytes": one.size,
            "repeats": one.repeats,
            "seconds": [one.seconds[at] for at in sorted(one.seconds)],
        }
        for one in turns
    ]
