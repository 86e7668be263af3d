"""What is run on a cluster, and what comes of it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any, Generic, TypeVar

from ddl.planning import interface, network
from ddl.planning.units import format_bits

SHARED_MEMORY = 5e9  # bytes a second of a rank's link inside its host; it never decides the bound


@dataclass(frozen=True)
class Scenario:
    """Work on one cluster. Without racks: on this host alone, over shared memory."""

    name: str
    title: str
    racks: tuple[int, ...]  # hosts in each
    ranks: int  # on each host
    rounds: int = 5
    link: str = "200mbit"
    uplink: str = "100mbit"

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.ranks * (sum(self.racks) or 1)


ScenarioT = TypeVar("ScenarioT", bound=Scenario)


@dataclass(frozen=True)
class Goodput:
    """The goodput of a host's link and of a rack's uplink (0: one rack), in bytes a second."""

    link: float
    uplink: float = 0.0

    def __str__(self) -> str:
        return f"a link {format_bits(self.link)}" + (f", an uplink {format_bits(self.uplink)}" if self.uplink else "")

    def apart(self, other: Goodput) -> float:
        """The largest relative difference of the two."""
        pairs = [(self.link, other.link)] + ([(self.uplink, other.uplink)] if self.uplink else [])
        return max(abs(one - two) / max(one, two) for one, two in pairs)


@dataclass(frozen=True)
class Run(Generic[ScenarioT]):
    """The records of a scenario's jobs, and the goodput of its links before and after (None: no links are shaped)."""

    scenario: ScenarioT
    records: Sequence[dict[str, Any]]  # as the jobs wrote them
    before: Goodput | None = None
    after: Goodput | None = None
    tries: int = 1

    def bound(self, nbytes: int) -> float:
        """The least seconds of any allreduce of `nbytes` bytes, by the mean of the calibrations; 0 without them."""
        if self.before is None or self.after is None:
            return 0.0
        it = self.scenario
        tiers = [
            {"name": "rank", "size": it.ranks, "bandwidth": SHARED_MEMORY},
            {"name": "host", "size": it.racks[0], "bandwidth": mean([self.before.link, self.after.link])},
        ]
        if len(it.racks) > 1:
            uplink = mean([self.before.uplink, self.after.uplink])
            tiers.append({"name": "rack", "size": len(it.racks), "bandwidth": uplink})
        return interface.bounds(network.from_dict({"tiers": tiers}).tree, nbytes).cut

    @property
    def head(self) -> list[str]:
        """The first lines of its report."""
        calibrations = {"before": self.before, "after": self.after}
        said = [f"calibrated {when}: {goodput}" for when, goodput in calibrations.items() if goodput is not None]
        return [self.scenario.title, *said]


@dataclass(frozen=True)
class Verdict:
    """A target and the result; `reached` is None if it could not be judged, or only by noise (`why`)."""

    what: str
    value: float | None
    target: str
    reached: bool | None
    why: str = ""

    def __str__(self) -> str:
        word = {True: "reached", False: "MISSED", None: "not judged"}[self.reached]
        parts = [] if self.value is None else [f"{self.value:.3f}"]
        parts += [f"target {self.target}"] if self.target else []
        parts += [self.why] if self.why else []
        return f"{word:<10} {self.what}: {', '.join(parts)}"


def at_most(what: str, value: float, limit: float) -> Verdict:
    """The verdict on a figure that is to be `limit` or less."""
    return Verdict(what, value, f"<= {limit}", value <= limit)


def at_least(what: str, value: float, limit: float) -> Verdict:
    """The verdict on a figure that is to be `limit` or more."""
    return Verdict(what, value, f">= {limit}", value >= limit)
