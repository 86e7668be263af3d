"""Results of a run on the virtual cluster: its links' goodput, and its records. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from scenarios import Scenario

from ddl.planning.units import format_bits

SHARED_MEMORY = 5e9  # bytes a second of a rank's link inside its host; it never decides the bound


@dataclass(frozen=True)
class Goodput:
    """The goodput of a host's link and of a rack's uplink (0: one rack), in bytes a second."""

    link: float
    uplink: float = 0.0

    def __str__(self) -> str:
        return f"a link {format_bits(self.link)}" + (f", an uplink {format_bits(self.uplink)}" if self.uplink else "")

    def mid(self, other: Goodput) -> Goodput:
        """The mean of the two."""
        return Goodput(mean([self.link, other.link]), mean([self.uplink, other.uplink]))

    def apart(self, other: Goodput) -> float:
        """The largest relative difference of the two."""
        pairs = [(self.link, other.link)] + ([(self.uplink, other.uplink)] if self.uplink else [])
        return max(abs(one - two) / max(one, two) for one, two in pairs)


@dataclass(frozen=True)
class Run:
    """The records of a scenario, one for each `ddlrun bench`, by the order of hosts that it was given."""

    scenario: Scenario
    before: Goodput | None
    after: Goodput | None
    records: tuple[tuple[tuple[int, ...], dict[str, object]], ...]
    tries: int = 1

    @property
    def network(self) -> dict[str, object] | None:
        """The network as `ddlrun plan` reads it, with the mean of the two calibrations."""
        if self.before is None or self.after is None:
            return None
        return describe(self.scenario.title, self.scenario.racks, self.scenario.ranks, self.before.mid(self.after))


def describe(title: str, racks: Sequence[int], ranks: int, goodput: Goodput) -> dict[str, object]:
    """A network as `ddlrun plan` reads it: `racks` has the number of hosts in each, `ranks` that of each host."""
    tiers = [
        {"name": "rank", "size": ranks, "bandwidth": SHARED_MEMORY},
        {"name": "host", "size": racks[0], "bandwidth": goodput.link},
    ]
    if len(racks) > 1:
        tiers.append({"name": "rack", "size": len(racks), "bandwidth": goodput.uplink})
    return {"name": title, "tiers": tiers}
