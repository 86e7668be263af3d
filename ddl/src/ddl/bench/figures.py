"""The figures: bandwidths, shares of the bound, ratios. Pure.

- algorithm bandwidth: bytes of the buffer over the time
- bus bandwidth: 2 (n - 1) / n x algorithm bandwidth, which each rank's link carries at least. It can be compared with a
  link's rate for any number of ranks (the definition of nccl-tests)
- bound: the least time of any algorithm on the described network (`ddl_bounds.cut`)
- ratio to DDL: the median over rounds of the other's time over DDL's of the same round
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median, quantiles

from ddl.bench.contest import LeftOut, Turns
from ddl.planning.units import format_bytes, format_size, format_time

Bound = Callable[[int], float]  # bytes of the buffer -> seconds


def bus_bandwidth(ranks: int, size: int, seconds: float) -> float:
    """Bytes a second; see above."""
    return 2 * (ranks - 1) / ranks * size / seconds


def ratios(other: Turns, base: Turns) -> list[float]:
    """The other's time over the base's, round by round."""
    return [seconds / base.seconds[at] for at, seconds in other.seconds.items() if at in base.seconds]


def spread(turns: Turns) -> float | None:
    """A contestant's own spread: half the distance between the quartiles of its rounds, over their median.

    None with a single round.
    """
    if len(turns.seconds) < 2:
        return None
    low, _, high = quantiles(turns.seconds.values(), n=4, method="inclusive")
    return (high - low) / 2 / turns.median


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
            for rate in (size / one.median, bus_bandwidth(ranks, size, one.median)):
                line += f"  {format_bytes(rate) if ranks > 1 else '-':>12}"
            line += f"  {bound(size) / one.median:>10.0%}" if bound else ""
            if len(names) > 1 and base in here:
                apart = spread(one)
                line += f"  {median(ratios(one, here[base])):.2f}"
                line += " (one round)" if apart is None else f" (± {apart:.0%})"
            lines.append(line)
    if ranks == 1:
        lines.append("one rank sends nothing: a time is that of a call and its copy")
    return "\n".join(lines)


def words(one: LeftOut) -> str:
    """A line that says that a contestant was left out."""
    since = "" if one.size is None else f" from {format_size(one.size)} on"
    return f"left out{since}: {one.why.splitlines()[0]}"


def to_json(turns: Sequence[Turns]) -> list[Mapping[str, object]]:
    """The measured figures as plain data."""
    return [
        {
            "contestant": one.name,
            "family": one.family,
            "bytes": one.size,
            "repeats": one.repeats,
            "seconds": [one.seconds[at] for at in sorted(one.seconds)],
        }
        for one in turns
    ]
