"""Decide: the dimensions of a job, ranks a host x hosts a rack x racks an aisle x aisles. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from ddl.launch.errors import CheckError
from ddl.launch.options import MEASURED, Mode


@dataclass(frozen=True)
class Dimensions:
    """Sizes from the inside out: (ranks a host, hosts a rack, racks an aisle, aisles); empty: libddl finds them."""

    sizes: tuple[int, ...]
    reason: str

    def __str__(self) -> str:
        return "x".join(map(str, self.sizes)) or "libddl's choice"


MEASURED_LATER = Dimensions((), "")  # by libddl


def choose(
    counts: Sequence[int],
    *,
    mode: Mode = MEASURED,
    nodes: int | None = None,
    racks: int | None = None,
    aisles: int | None = None,
) -> Dimensions:
    """The dimensions of a job with `counts` ranks on each of its hosts.

    The mode's own dimensions come first. Else the hosts are divided into `aisles` of `racks` (default 1 of 1) of
    `nodes` hosts. In mode p, if none of these is given, libddl measures the links and chooses. Hosts with different
    counts have no dimensions. Raises CheckError if sizes do not multiply to the number of ranks or hosts; it names
    both.
    """
    ranks, hosts = sum(counts), len(counts)
    if mode.dimensions:
        if prod(mode.dimensions) != ranks:
            raise CheckError(
                "dimensions",
                f"-m {mode} multiplies to {prod(mode.dimensions)} ranks, and there are {ranks} ({_spread(counts)}); "
                f"give dimensions that multiply to {ranks}, or leave them to ddlrun: -m {mode.letters[0]}",
            )
        return Dimensions(mode.dimensions, f"-m {mode}")
    shape = (racks or 1) * (aisles or 1)
    per_rack = nodes if nodes is not None else hosts // shape
    if per_rack * shape != hosts:
        named = f"{nodes} nodes x " if nodes is not None else ""
        raise CheckError(
            "dimensions",
            f"{named}{racks or 1} racks x {aisles or 1} aisles "
            + (
                f"is {per_rack * shape} hosts, and there are {hosts}"
                if nodes
                else f"do not divide {hosts} hosts evenly"
            )
            + "; give --nodes, --racks and --aisles that multiply to the number of hosts",
        )
    if len(set(counts)) > 1:
        if len(mode.letters) > 1:
            raise CheckError(
                "dimensions",
                f"-m {mode} has a mode for each of {len(mode.letters)} dimensions, and hosts with different numbers of "
                f"ranks ({_spread(counts)}) have only one; give one mode, or as many ranks on each",
            )
        return Dimensions((), f"the hosts run different numbers of ranks ({_spread(counts)})")
    if mode.letters == "p" and (nodes, racks, aisles) == (None, None, None):
        found = "the ranks share a host" if hosts == 1 else "it measures the links between the hosts"
        return Dimensions((), f"{_spread(counts)}; {found}")
    sizes = (counts[0], per_rack, racks or 1, aisles or 1)
    asked = [f"--{name} {value}" for name, value in (("nodes", nodes), ("racks", racks), ("aisles", aisles)) if value]
    by = f", by {' '.join(asked)}" if asked else ""
    return Dimensions(sizes, f"{_spread(counts)}{by}")


def _spread(counts: Sequence[int]) -> str:
    if len(set(counts)) == 1:
        return f"{counts[0]} on each of {len(counts)} {'host' if len(counts) == 1 else 'hosts'}"
    shown = " + ".join(map(str, counts[:8]))
    return shown if len(counts) <= 8 else f"{shown} + ..."
