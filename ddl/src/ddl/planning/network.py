"""Described networks: read from TOML, JSON or the catalogue, changed by options, and drawn as a tree.

name = "AC922 with 4 V100"
reduce = "400 GB/s"          # bytes that a rank adds in a second; if left out, adding takes no time

[[tiers]]                    # innermost first
name = "GPU"                 # the children of the tier's switches: ranks of a host, then hosts, racks, aisles
size = 4                     # how many below one switch
bandwidth = "75 GB/s"        # of each child's link, in each direction, as programs get it
latency = "10 us"            # for a message that turns around at this tier
source = "where these figures come from"

[[odd]]                      # children that differ from the others; may be repeated
name = "host"                # the name of their tier
numbers = "0-3,7"            # counted over all hosts of the network, from 0
size = 2                     # how many ranks they have, if not as the others
bandwidth = "1 Gbit/s"       # of their links, if not as the others
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import Any

from ddl.launch import files
from ddl.launch.counts import format_runs, quoted
from ddl.planning import units
from ddl.planning.interface import MOST_TIERS, Odd, Tier, Tree

MACHINES = Path(__file__).with_name("machines")
SUFFIXES = (".toml", ".json")
NAMES = ("rank", "host", "rack", "aisle")  # default names of tiers


class DescriptionError(ValueError):
    """A wrong description. The message names the file, the place in it, and what is expected there."""


@dataclass(frozen=True)
class Level:
    """A tier as described (see the module's docstring), in seconds and bytes a second."""

    name: str
    size: int
    bandwidth: float
    latency: float
    source: str = ""


@dataclass(frozen=True)
class Exceptions:
    """Children of a level that differ from the others in size or bandwidth, by their numbers in the network."""

    name: str
    numbers: tuple[int, ...]
    size: int = 0
    bandwidth: float = 0.0

    @property
    def span(self) -> str:
        """The numbers, with runs joined: `0-3,7`."""
        return format_runs(self.numbers)


@dataclass(frozen=True)
class Network:
    """A described network: its levels, innermost first, and bytes a second that a rank reduces (0: no time)."""

    levels: tuple[Level, ...]
    name: str = ""
    reduce: float = 0.0
    source: str = ""
    odd: tuple[Exceptions, ...] = ()

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.children(0)

    def children(self, tier: int) -> int:
        """The number of children of all switches of a tier: ranks, hosts, racks, ..."""
        if tier == len(self.levels):
            return 1  # the outermost switch
        odd = [one for one in self.odd if one.size and one.name == self._name(tier + 1)]
        more = sum(len(one.numbers) * (one.size - self.levels[tier].size) for one in odd)
        return self.children(tier + 1) * self.levels[tier].size + more

    def below(self, tier: int) -> list[range]:
        """For each child of a tier: its children in the tier below; for each rank: itself."""
        if tier == 0:
            return [range(rank, rank + 1) for rank in range(self.ranks)]
        sizes = [self.levels[tier - 1].size] * self.children(tier)
        for one in self.odd:
            if one.size and one.name == self._name(tier):
                for number in one.numbers:
                    sizes[number] = one.size
        ends = list(accumulate(sizes, initial=0))
        return [range(first, end) for first, end in pairwise(ends)]

    def ranks_below(self, tier: int) -> list[range]:
        """For each child of a tier: its ranks."""
        if tier == 0:
            return self.below(0)
        inside = self.ranks_below(tier - 1)
        return [range(inside[one.start].start, inside[one.stop - 1].stop) for one in self.below(tier)]

    def bandwidths(self, tier: int) -> list[float]:
        """The bandwidth of each child's link of a tier, in bytes a second."""
        made = [self.levels[tier].bandwidth] * self.children(tier)
        for one in self.odd:
            if one.bandwidth and one.name == self._name(tier):
                for number in one.numbers:
                    made[number] = one.bandwidth
        return made

    def _name(self, tier: int) -> str | None:
        return self.levels[tier].name if tier < len(self.levels) else None

    @property
    def tree(self) -> Tree:
        """The network as the library simulates it. Raises DescriptionError for exceptions that name no level."""
        tiers = {level.name: tier for tier, level in reversed(list(enumerate(self.levels)))}
        odd: dict[tuple[int, int], Odd] = {}
        for one in self.odd:
            if one.name not in tiers:
                raise DescriptionError(f"odd {one.name}: expected {' or '.join(tiers)}, the levels of the network")
            for number in one.numbers:
                tier = tiers[one.name]
                before = odd.get((tier, number), Odd(tier, number))
                size, bandwidth = one.size or before.size, one.bandwidth or before.bandwidth
                odd[tier, number] = Odd(tier, number, size, bandwidth)
        made = tuple(Tier(one.size, one.latency, one.bandwidth) for one in self.levels)
        return Tree(made, self.reduce, tuple(odd.values()))

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON; `from_dict` reads it back."""
        return {
            "name": self.name,
            "reduce": self.reduce,
            "source": self.source,
            "tiers": list(map(asdict, self.levels)),
            "odd": [
                {"name": one.name, "numbers": one.span, "size": one.size or None, "bandwidth": one.bandwidth or None}
                for one in self.odd
            ],
        }

    def picture(self) -> str:
        """The network as a tree in ASCII, with equal branches in one line."""
        rows = [("all", "")]
        for depth, level in enumerate(reversed(self.levels)):
            shared = prod(one.size for one in self.levels[: len(self.levels) - 1 - depth])
            shared = shared if not any(one.size for one in self.odd) else 1
            about = f"link {units.format_bits(level.bandwidth)} ({units.format_bytes(level.bandwidth)}), "
            about += f"latency {units.format_time(level.latency)}"
            about += f", shared by {shared} ranks" if shared > 1 else ""
            rows.append((f"{'    ' * depth}+-- {level.size} x {level.name}", about))
        inside = dict(zip([one.name for one in self.levels[1:]], self.levels, strict=False))
        for one in self.odd:
            unlike = [f"{one.size} x {inside[one.name].name}"] if one.size else []
            if one.bandwidth:
                unlike.append(f"link {units.format_bits(one.bandwidth)} ({units.format_bytes(one.bandwidth)})")
            rows.append((f"but {one.name} {one.span}:", ", ".join(unlike)))
        width = max(len(left) for left, _ in rows)
        return "\n".join(f"{left:{width}}  {right}".rstrip() for left, right in rows[1:])


# The default: shared memory in the host, 10 Gbit/s Ethernet between hosts.
DEFAULT = Network(
    (
        Level("rank", 1, 5e9, 1e-6, "assumed: shared memory of a server"),
        Level("host", 1, 1.25e9, 30e-6, "assumed: 10 Gbit/s Ethernet"),
    )
)


def machines() -> list[str]:
    """The names of the catalogue."""
    return sorted(path.stem for path in MACHINES.glob("*.toml"))


def load(name: str) -> Network:
    """The network of a file, or of a machine in the catalogue. Raises DescriptionError."""
    path = Path(name)
    if path.suffix not in SUFFIXES:
        if name not in machines():
            raise DescriptionError(
                f"{quoted(name)} is neither a machine of the catalogue nor a .toml or .json file; the machines are "
                f"{', '.join(machines())}"
            )
        path = MACHINES / f"{name}.toml"
    try:
        text = files.read(path)
    except OSError as error:
        raise DescriptionError(f"{quoted(name)}: it cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DescriptionError(f"{name}: it is not text") from None
    try:
        document = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise DescriptionError(f"{name}: it is not {path.suffix[1:].upper()}: {error}") from None
    return from_dict(document, name)


def from_dict(document: object, where: str = "network") -> Network:
    """The network of a parsed file. Raises DescriptionError that begins with `where`."""
    table = _table(document, where, {"name", "reduce", "source", "tiers", "odd"})
    tiers = table.get("tiers")
    if not isinstance(tiers, list) or not 1 <= len(tiers) <= MOST_TIERS:
        raise DescriptionError(f"{where}: tiers: expected a list of 1 to {MOST_TIERS} tables, innermost first")
    levels = tuple(_level(tier, f"{where}: tiers[{at}]", at) for at, tier in enumerate(tiers))
    reduce = table.get("reduce", 0)
    odd = table.get("odd", [])
    if not isinstance(odd, list):
        raise DescriptionError(f"{where}: odd: expected a list of tables, each with a name and numbers")
    return with_odd(
        Network(
            levels,
            _text(table, "name", where, ""),
            0.0 if reduce == 0 else _read(table, "reduce", where, units.parse_rate),
            _text(table, "source", where, ""),
        ),
        [_exceptions(one, f"{where}: odd[{at}]") for at, one in enumerate(odd)],
    )


def with_odd(network: Network, odd: Sequence[Exceptions]) -> Network:
    """The network with more exceptions. Raises DescriptionError if they do not fit it."""
    made = replace(network, odd=(*network.odd, *odd))
    names = [level.name for level in network.levels]
    for one in odd:
        if one.name not in names:
            raise DescriptionError(f"odd {one.name} {one.span}: the network has {', '.join(names)}")
        tier = names.index(one.name)
        if one.size and tier == 0:
            raise DescriptionError(f"odd {one.name} {one.span}: a {one.name} has nothing below it; give a rate")
        if one.numbers[-1] >= made.children(tier):
            count = made.children(tier)
            raise DescriptionError(f"odd {one.name} {one.span}: there are {count:,} of them, counted from 0")
    return made


def parse_odd(text: str) -> Exceptions:
    """Exceptions of `host7=1gbit`, `host0-3,9=2` or `rack1=3,10gbit`. Raises ValueError."""
    found = re.fullmatch(r"\s*([A-Za-z]+)\s*([0-9,-]+)=([^,]+)(?:,([^,]+))?", text)
    size, bandwidth = 0, 0.0
    if found is None:
        raise ValueError(f"{text!r}: expected a tier, numbers and what is odd, such as host7=1gbit or host0-3=2")
    for value in filter(None, found.groups()[2:]):
        if value.strip().isdecimal():
            size = int(value)
        else:
            bandwidth = units.parse_rate(value)
    if len(list(filter(None, found.groups()[2:]))) != (size > 0) + (bandwidth > 0):
        raise ValueError(f"{text!r}: expected a size above 0, a rate, or one of each")
    return Exceptions(found[1].lower(), _numbers(found[2]), size, bandwidth)


def _numbers(text: str) -> tuple[int, ...]:
    """`0-3,7` as 0, 1, 2, 3, 7. Raises ValueError."""
    numbers: set[int] = set()
    for run in text.split(","):
        found = re.fullmatch(r"([0-9]{1,7})(?:-([0-9]{1,7}))?", run.strip())
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise ValueError(f"{text!r}: expected numbers from 0 and runs of them, such as 7 or 0-3,9")
        numbers.update(range(int(found[1]), int(found[2] or found[1]) + 1))
    return tuple(sorted(numbers))


def _exceptions(document: object, where: str) -> Exceptions:
    table = _table(document, where, {"name", "numbers", "size", "bandwidth"})
    try:
        numbers = _numbers(str(table.get("numbers", "")))
    except ValueError as error:
        raise DescriptionError(f"{where}: numbers: {error}") from None
    size = table.get("size") or 0
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise DescriptionError(f"{where}: size: {size!r}; expected a whole number, 1 or more")
    given = table.get("bandwidth") is not None
    bandwidth = _read(table, "bandwidth", where, units.parse_rate) if given else 0.0
    if not size and not bandwidth:
        raise DescriptionError(f"{where}: expected a size, a bandwidth or both, which are odd")
    return Exceptions(_text(table, "name", where, ""), numbers, size, bandwidth)


def changed(
    network: Network,
    *,
    ranks: int | None = None,
    hosts: int | None = None,
    racks: int | None = None,
    aisles: int | None = None,
    rates: Sequence[float | None] = (),
    latencies: Sequence[float | None] = (),
) -> Network:
    """The network with other numbers: ranks a host, hosts in all, racks an aisle, aisles; rates and latencies by tier.

    A missing tier is added above the others; without a rate, its links carry all that comes from below. Raises
    DescriptionError if the hosts cannot be divided evenly.
    """
    levels = list(network.levels)
    sizes = (ranks, hosts, racks, aisles)
    needed = max((at + 1 for given in (sizes, rates, latencies) for at, value in enumerate(given) if value), default=1)
    added = range(len(levels), needed)
    for at in added:
        template = DEFAULT.levels[1] if at == 1 else replace(levels[-1], source="assumed: it carries all from below")
        levels.append(replace(template, name=NAMES[at], size=1))
    for at, size in enumerate(sizes):
        if size and at != 1:
            levels[at] = replace(levels[at], size=size)
    if hosts:
        groups = prod(level.size for level in levels[2:])
        if hosts % groups:
            raise DescriptionError(
                f"{hosts} hosts cannot be divided evenly among {groups} racks; give --hosts (in all), --racks (in an "
                "aisle) and --aisles that fit"
            )
        levels[1] = replace(levels[1], size=hosts // groups)
    for at in range(len(levels)):
        rate = rates[at] if at < len(rates) else None
        if rate:
            levels[at] = replace(levels[at], bandwidth=rate, source="as given")
        elif at in added and at > 1:
            levels[at] = replace(levels[at], bandwidth=levels[at - 1].bandwidth * levels[at - 1].size)
        latency = latencies[at] if at < len(latencies) else None
        if latency is not None:
            levels[at] = replace(levels[at], latency=latency)
    return with_odd(replace(network, levels=tuple(levels), odd=()), network.odd)


def _level(document: object, where: str, at: int) -> Level:
    table = _table(document, where, {"name", "size", "bandwidth", "latency", "source"})
    size = table.get("size")
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise DescriptionError(f"{where}: size: {size!r}; expected a whole number, 1 or more")
    default = NAMES[at] if at < len(NAMES) else f"group {at}"
    return Level(
        _text(table, "name", where, default),
        size,
        _read(table, "bandwidth", where, units.parse_rate),
        _read(table, "latency", where, units.parse_time) if "latency" in table else 0.0,
        _text(table, "source", where, ""),
    )


def _table(document: object, where: str, known: set[str]) -> Mapping[str, Any]:
    if not isinstance(document, dict):
        raise DescriptionError(f"{where}: expected a table with {', '.join(sorted(known))}")
    if unknown := sorted(set(document) - known):
        raise DescriptionError(f"{where}: {unknown[0]}: unknown; expected {', '.join(sorted(known))}")
    return document


def _text(table: Mapping[str, Any], key: str, where: str, default: str) -> str:
    value = table.get(key, default)
    if not isinstance(value, str) or not value.replace("\n", " ").isprintable():  # it could command a terminal
        raise DescriptionError(f"{where}: {key}: {value!r}; expected text without control characters")
    return value


def _read(table: Mapping[str, Any], key: str, where: str, parse: Callable[[Any], float]) -> float:
    if key not in table:
        raise DescriptionError(f"{where}: {key}: missing")
    try:
        return float(parse(table[key]))
    except ValueError as error:
        raise DescriptionError(f"{where}: {key}: {error}") from None
