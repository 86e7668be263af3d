"""Whether passes still cost what their plan assumed. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from lms.core.link import Link
from lms.core.plan import Plan
from lms.core.trace import Trace
from lms.stats import format_seconds
from lms.units import format_size

FACTOR = 1.5  # by which a cost must differ from what the plan assumed
IN_A_ROW = 3  # timed passes that must agree: a single one may have been disturbed
LASTS = 2.0  # seconds of computation that these must have at least: other programs disturb short passes in a row
REST = 16  # passes that a new plan runs before it is looked at; twice as many each time


class Drift:
    """Looks at the timed passes of one plan, for computation or copies that take longer or shorter than it assumed."""

    def __init__(self) -> None:
        self.samples: deque[list[float]] = deque(maxlen=IN_A_ROW)  # gaps of the passes in a row that agree; the last
        self._seconds = 0.0  # of computation in all of them
        self._agreed: set[tuple[str, bool]] = set()  # which costs have drifted in all of these, and whether they grew
        self._replans = 0
        self._rests_until = 0

    @property
    def suspected(self) -> bool:
        """Whether the next pass should be timed, to see if it agrees."""
        return bool(self.samples)

    def note(
        self, passes: int, trace: Trace, plan: Plan, link: Link | None, gaps: Sequence[float], *, usual: float
    ) -> str:
        """What has drifted, for people, once enough passes agree; else "".

        `trace` is what the `plan` was made from, when a pass computed for `usual` seconds; `link` and `gaps` (seconds
        of computation before each access and in the tail) are as they are now, after `passes` passes that followed the
        plan.
        """
        if not plan.moves or passes < self._rests_until:
            self.forget()
            return ""
        found = _drifts(trace, plan, link, sum(gaps), usual)
        signs = {(name, ratio > 1) for name, (ratio, _) in found.items()}
        if not self._agreed & signs:
            self.forget()  # another drift, or none
            self._agreed = signs
        self._agreed &= signs
        if not signs:
            return ""
        self.samples.append(list(gaps))
        self._seconds += sum(gaps)
        if len(self.samples) < IN_A_ROW or self._seconds < LASTS:
            return ""
        return "; ".join(f"{name} {found[name][0]:.2f} x as long {found[name][1]}" for name, _ in sorted(self._agreed))

    def settle(self, passes: int) -> None:
        """A new plan was made after `passes` passes."""
        self._rests_until = passes + (REST << self._replans)
        self._replans += 1
        self.forget()

    def forget(self) -> None:
        """Drop what was noted: it is about another plan, or later passes contradict it."""
        self.samples.clear()
        self._seconds = 0.0
        self._agreed = set()


def _drifts(trace: Trace, plan: Plan, link: Link | None, seconds: float, usual: float) -> dict[str, tuple[float, str]]:
    """The costs that are a factor away from what they were: the ratio to that, and both in words."""
    found = {}
    if usual > 0 and seconds > 0:
        text = f"({format_seconds(seconds)} a pass, {format_seconds(usual)} as planned)"
        found["computation takes"] = seconds / usual, text
    if link is not None and trace.link:
        assumed = Link.from_dict(trace.link)
        lanes = [span.lane for span in plan.forecast.spans]
        for name, nbytes, copies, price, price_before in (
            ("copies out take", plan.forecast.out, lanes.count("out"), link.seconds_out, assumed.seconds_out),
            ("copies back take", plan.forecast.back, lanes.count("back"), link.seconds_back, assumed.seconds_back),
        ):
            if not nbytes:
                continue
            mean = max(1, nbytes // copies)
            now, before = price(mean), price_before(mean)
            rates = f"({format_size(mean / now)}/s, {format_size(mean / before)}/s as planned)"
            found[name] = now / before, rates
    return {name: drift for name, drift in found.items() if not 1 / FACTOR < drift[0] < FACTOR}
