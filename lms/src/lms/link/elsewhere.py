"""The time of a recorded step on the links of described machines. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lms.core.link import Link
from lms.core.plan import Plan, make_plan
from lms.core.simulate import simulate
from lms.core.trace import Trace
from lms.link.comparison import SLOWER, most

SHARE = 0.25  # of the saved bytes that stay
FASTEST = 1e6  # times: beyond it computation takes no time


@dataclass(frozen=True)
class Elsewhere:
    """The step with SHARE of its saved bytes on the device, over one link. Seconds and bytes a second."""

    name: str
    out: float
    back: float
    seconds: float
    slowdown: float  # over its computation alone
    headroom: float  # computation could be so many times as fast before the step takes SLOWER times as long as it


def elsewhere(trace: Trace, links: Sequence[tuple[str, Link]]) -> list[Elsewhere]:
    """The step over each of the links, under the names given."""
    found = []
    for name, link in links:
        plan = make_plan(trace, link, budget=int(SHARE * trace.saved))
        seconds = plan.forecast.seconds
        slowdown = seconds / trace.seconds if trace.seconds else 1.0
        found.append(Elsewhere(name, link.out, link.back, seconds, slowdown, headroom(trace, plan, link)))
    return found


def headroom(trace: Trace, plan: Plan, link: Link) -> float:
    """How many times as fast the computation may become until `plan` takes SLOWER times as long as the computation.

    0 if it already does; infinity if nothing is moved.
    """
    if not plan.moves or not trace.seconds:
        return float("inf")

    def hides(factor: float) -> bool:
        # A link that is slower by the factor, in time that is longer by it, is the same step: simulated without a copy
        # of the trace.
        slower = replace(link.scaled(1 / factor), latency=link.latency * factor)
        return simulate(trace, plan, slower).seconds <= SLOWER * trace.seconds

    return most(hides, 1.0, FASTEST, 1.05)
