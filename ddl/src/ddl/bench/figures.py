"""What the times mean: bandwidths, shares of the bound, ratios. Pure.

- algorithm bandwidth: bytes of the buffer over the time
- bus bandwidth: 2 (n - 1) / n x algorithm bandwidth: what each rank's link carries at least, so that it can be compared
  with a link's rate whatever the number of ranks (the definition of nccl-tests)
- bound: the least time that any algorithm can take: over all cuts that part the network's groups of ranks, the largest
  of 2 (G - 1) / G x S / C, for G groups behind links that carry C (ForestColl, arXiv:2402.06787)
- ratio to DDL: the median over rounds of the other's time over DDL's of the same round
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median

from ddl.bench.contest import Turns


@dataclass(frozen=True)
class Links:
    """Measured goodput in bytes a second: of each host's link, and of each rack's uplink (None: one rack)."""

    hosts: int
    link: float
    racks: int = 1
    uplink: float | None = None


def bound(links: Links, size: int) -> float:
    """The least seconds that an allreduce of `size` bytes takes; 0 for one host."""

    def term(groups: int, rate: float) -> float:
        return 2 * (groups - 1) / groups * size / rate

    return max(term(links.hosts, links.link), term(links.racks, links.uplink) if links.uplink else 0.0)


def bus_bandwidth(ranks: int, size: int, seconds: float) -> float:
    """Bytes a second; see above."""
    return 2 * (ranks - 1) / ranks * size / seconds


def ratios(other: Turns, base: Turns) -> list[float]:
    """The other's time over the base's, round by round."""
    return [seconds / base.seconds[at] for at, seconds in other.seconds.items() if at in base.seconds]


def best_of(turns: Iterable[Turns], prefix: str) -> Turns | None:
    """The fastest, by its median, of those whose name begins with `prefix`."""
    return min((one for one in turns if one.name.startswith(prefix)), key=lambda one: one.median, default=None)


def spread(turns: Turns) -> float:
    """How far a contestant is from itself: half the range of its rounds over their median, without the two ends."""
    values = sorted(turns.seconds.values())
    inner = values[1:-1] if len(values) > 4 else values
    return (inner[-1] - inner[0]) / 2 / turns.median if inner else inf


def table(turns: Sequence[Turns], ranks: int, base: str, links: Links | None = None) -> str:
    """A line for each size and contestant: time, bandwidths, share of the bound, ratio to `base`."""
    names = list(dict.fromkeys(one.name for one in turns))
    width = max(map(len, names))
    head = f"{'size':>9}  {'':<{width}}  {'time':>10}  {'algorithm':>12}  {'bus':>12}"
    head += "  bound/time" if links else ""
    lines = [head + (f"  x {base}'s time" if len(names) > 1 else "")]
    for size in dict.fromkeys(one.size for one in turns):
        here = {one.name: one for one in turns if one.size == size}
        for name, one in sorted(here.items(), key=lambda pair: pair[1].median):
            line = f"{human(size):>9}  {name:<{width}}  {_seconds(one.median):>10}"
            line += f"  {_rate(size / one.median):>12}  {_rate(bus_bandwidth(ranks, size, one.median)):>12}"
            line += f"  {bound(links, size) / one.median:>10.0%}" if links else ""
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


def human(size: int) -> str:
    """A number of bytes with the largest binary unit that divides it."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def _seconds(value: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if value >= unit:
            return f"{value / unit:.3g} {name}"
    return f"{value / 1e-6:.3g} us"


def _rate(value: float) -> str:
    return f"{value / 1e9:.3g} GB/s" if value >= 1e9 else f"{value / 1e6:.3g} MB/s"
