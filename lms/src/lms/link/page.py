"""The part of a report about links: the machine's own counters, and the step on other machines' links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lms.core.link import Link
from lms.core.plan import make_plan
from lms.core.trace import Trace
from lms.drawing import svg
from lms.link import catalogue, chart, table
from lms.link.comparison import FASTEST, SLOWER, headroom
from lms.link.watch import Watched

SHARE = 0.25  # of the saved bytes that stay, in forecasts for other links
MACHINES = ("pcie-3", "pcie-4", "pcie-5", "ac922-4", "gh200")  # PowerAI's question: NVLink or PCIe, then and now


def facts(
    trace: Trace, link: Link | None, watched: Watched | str | None, stats: Mapping[str, float | int | None] | None
) -> dict[str, object]:
    """What the template `links.html` needs. `watched` may say why nothing was counted."""
    why, watched = (watched, None) if isinstance(watched, str) else ("", watched)
    counted = []
    if watched is not None and stats is not None:
        # Each way, the bytes that LMS moved, and those that the machine counted.
        counted = [("out", stats.get("swapped_out"), watched.out), ("back", stats.get("swapped_in"), watched.back)]
    return {
        "elsewhere": elsewhere(trace, [("here", link), *_described()]) if link is not None and trace.tensors else [],
        "share": SHARE,
        "slowdown": trace.slowdown,
        "slower": SLOWER,
        "watched": watched,
        "counted": counted,
        "watched_svg": svg(chart.draw_watched(watched)) if watched is not None and watched.samples else "",
        "why": why,
    }


def elsewhere(trace: Trace, links: Sequence[tuple[str, Link]]) -> list[tuple[str, Link, float, float]]:
    """The step over each link: its name, the link, the step's seconds, and its `headroom`."""
    plans = [make_plan(trace, link, budget=int(SHARE * trace.saved)) for _, link in links]
    return [
        (name, link, plan.forecast.seconds, headroom(trace, plan, link))
        for (name, link), plan in zip(links, plans, strict=True)
    ]


def headroom_text(headroom: float) -> str:
    """How many times as fast the computation may become, in words."""
    if headroom == 0:
        return "none"
    return f"{table.plain(headroom)} x" if headroom < FASTEST else "any"


def _described() -> list[tuple[str, Link]]:
    found = []
    for name in MACHINES:
        machine = catalogue.machine(name)
        (measured,) = machine.of("gpu")
        if (link := measured.link()) is not None:
            found.append((machine.name, link))
    return found
