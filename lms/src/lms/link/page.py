"""The part of a report about links: the machine's own counters, and the step on other machines' links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lms.core.link import Link
from lms.core.trace import Trace
from lms.drawing import svg
from lms.link import catalogue, chart
from lms.link.comparison import SLOWER
from lms.link.elsewhere import FASTEST, SHARE, elsewhere
from lms.link.watch import Watched

MACHINES = ("pcie-3", "pcie-4", "pcie-5", "ac922-4", "gh200")  # PowerAI's question: NVLink or PCIe, then and now


@dataclass(frozen=True)
class Counted:
    """One direction: the bytes that LMS moved, and those that the machine counted."""

    way: str
    ours: int
    theirs: int | None


def facts(
    trace: Trace,
    link: Link | None,
    watched: Watched | None,
    stats: Mapping[str, float | int | None] | None,
    why: str = "",
) -> dict[str, object]:
    """What the template `links.html` needs. `why` says why nothing was counted."""
    counted = []
    if watched is not None and stats is not None:
        pairs = (("out", "swapped_out", watched.out), ("back", "swapped_in", watched.back))
        counted = [Counted(way, int(stats.get(name) or 0), theirs) for way, name, theirs in pairs]
    return {
        "elsewhere": elsewhere(trace, [("here", link), *_described()]) if link is not None and trace.tensors else [],
        "share": SHARE,
        "slower": SLOWER,
        "watched": watched,
        "counted": counted,
        "watched_svg": svg(chart.draw_watched(watched)) if watched is not None and watched.samples else "",
        "why": why,
    }


def headroom_text(headroom: float) -> str:
    """How many times as fast the computation may become, in words."""
    if headroom == 0:
        return "none"
    return f"{headroom:.3g} x" if headroom < FASTEST else "any"


def _described() -> list[tuple[str, Link]]:
    found = []
    for name in MACHINES:
        machine = catalogue.machine(name)
        (measured,) = machine.of("gpu")
        if (link := measured.link()) is not None:
            found.append((machine.name, link))
    return found
