"""Two machines side by side: each kind of link, and what a recorded step costs on both. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from lms.core.link import Link
from lms.core.plan import Plan, make_plan, plain_peak, table
from lms.core.simulate import simulate
from lms.core.trace import Trace
from lms.errors import LimitError
from lms.link.profile import KINDS, Kind, Profile
from lms.link.series import DIRECTIONS, Direction, Series

FRAC = 0.9  # of the device's memory that a step may fill, as `lms run` has it by default
FASTEST = 1e6  # times as fast: beyond it computation takes no time
SLOWER = 1.10  # what a step may take over its computation alone and still count as hidden
_LEAST = 1e-3  # times as large a batch: below it none counts as fitting
_MOST = 4096.0  # times as large a batch: larger than any that is trained


@dataclass(frozen=True)
class Row:
    """One direction of one kind of link on both machines; None if a machine has none, or it was not measured."""

    kind: Kind
    direction: Direction
    one: Series | None
    other: Series | None

    @property
    def ratio(self) -> float | None:
        """The first machine's rate over the second's."""
        return self.one.rate / self.other.rate if self.one is not None and self.other is not None else None


@dataclass(frozen=True)
class Largest:
    """Batches, as multiples of the recorded one, that fit a machine; 0: not even a thousandth of it does."""

    plain: float  # with nothing swapped
    hidden: float  # swapped, in at most SLOWER times the computation alone
    most: float  # swapped, however long it takes


@dataclass(frozen=True)
class Share:
    """A step that may keep one share of its saved bytes on the device. Seconds and bytes."""

    share: float  # of the saved bytes
    seconds: float
    stall: float  # waiting for copies, both ways
    moved: int  # bytes out
    slowdown: float  # over its computation alone


@dataclass(frozen=True)
class Prediction:
    """A recorded step on one machine."""

    link: Link
    kind: Kind
    shares: tuple[Share, ...]  # the most that stays first
    largest: Largest | None  # None if the machine's memory is not known


@dataclass(frozen=True)
class Comparison:
    """What `lms link compare` found out. `step` is None without a trace."""

    one: Profile
    other: Profile
    rows: tuple[Row, ...]
    step: tuple[Prediction, Prediction] | None = None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, object]:
        """Plain data for JSON: rates in bytes a second, times in seconds, sizes in bytes."""
        return {
            "format": "lms-link-comparison-1",
            "machines": [self.one.name, self.other.name],
            "rows": [
                {
                    "kind": row.kind,
                    "direction": row.direction,
                    "rates": [None if side is None else side.rate for side in (row.one, row.other)],
                    "by": [None if side is None else side.via for side in (row.one, row.other)],
                    "ratio": row.ratio,
                }
                for row in self.rows
            ],
            "step": None if self.step is None else [asdict(side) for side in self.step],
            "notes": list(self.notes),
        }


def compare(one: Profile, other: Profile, trace: Trace | None = None, *, speedup: float = 1.0) -> Comparison:
    """Compare the two machines and, with `trace`, its step on each, computing `speedup` times as fast as recorded.

    Raises ValueError if a machine has no link that a step could be swapped over.
    """
    pairs = [(kind, way, _typical(one, kind, way), _typical(other, kind, way)) for kind in KINDS for way in DIRECTIONS]
    rows = tuple(Row(*pair) for pair in pairs if pair[2] is not None or pair[3] is not None)
    if trace is None:
        return Comparison(one, other, rows)
    faster = at_speed(trace, speedup)
    kinds, notes = _swapped_over(one, other, trace)
    step = tuple(predict(profile, kind, faster) for profile, kind in zip((one, other), kinds, strict=True))
    return Comparison(one, other, rows, (step[0], step[1]), notes)


def predict(profile: Profile, kind: Kind, trace: Trace) -> Prediction:
    """The step on a machine, swapped over its slowest link of `kind`: if several train, all wait for that one."""
    links = [link for one in profile.of(kind) if (link := one.link()) is not None]
    link = min(links, key=lambda link: min(link.out, link.back))
    plans = table(trace, link)
    return Prediction(link, kind, tuple(_share(trace, plan) for plan in plans), _largest(profile, kind, trace, link))


def at_speed(trace: Trace, factor: float) -> Trace:
    """The step with its computation `factor` times as fast."""
    return trace.with_measured([seconds / factor for seconds in trace.times], trace.others)


def batch(trace: Trace, times: float) -> Trace:
    """The step with a batch `times` as large.

    Saved bytes and computation grow with it. Of the device's other bytes, the least of the step counts as fixed
    (parameters, interpreter), the rest as growing (the scratch memory of operations).
    """
    fixed = min(trace.others)
    others = [fixed + round((other - fixed) * times) for other in trace.others]
    larger = trace.with_measured([seconds * times for seconds in trace.times], others)
    return replace(
        larger, tensors=tuple(replace(one, nbytes=max(1, round(one.nbytes * times))) for one in trace.tensors)
    )


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


def _typical(profile: Profile, kind: Kind, direction: Direction) -> Series | None:
    """The series that every link of the kind reaches: the slowest link's.

    In memory that is the most that all threads of one NUMA node together get, on the slowest node.
    """
    found = [series for link in profile.of(kind) if (series := link.best(direction)) is not None]
    return min(found, key=lambda series: series.rate, default=None)


def _swapped_over(one: Profile, other: Profile, trace: Trace) -> tuple[tuple[Kind, Kind], tuple[str, ...]]:
    order: tuple[Kind, ...] = ("file", "gpu") if trace.device == "cpu" else ("gpu", "file")
    have = [[kind for kind in order if any(link.link() for link in profile.of(kind))] for profile in (one, other)]
    for profile, kinds in zip((one, other), have, strict=True):
        if not kinds:
            raise ValueError(f"{profile.name}: no link to swap over was measured there, neither GPU to host nor file")
    both = [kind for kind in order if kind in have[0] and kind in have[1]]
    if both:
        return (both[0], both[0]), ()
    ours, theirs = have[0][0], have[1][0]
    words = f"{KINDS[ours]} on {one.name} and {KINDS[theirs]} on {other.name}"
    return (ours, theirs), (f"they have no link of one kind to swap over: compared are {words}",)


def _share(trace: Trace, plan: Plan) -> Share:
    forecast = plan.forecast
    return Share(
        share=plan.budget / trace.saved if trace.saved else 1.0,
        seconds=forecast.seconds,
        stall=forecast.stall_out + forecast.stall_in,
        moved=forecast.out,
        slowdown=trace.slowdown(forecast.seconds),
    )


def _largest(profile: Profile, kind: Kind, trace: Trace, link: Link) -> Largest | None:
    device = profile.capacity.get("device" if kind == "gpu" else "host", 0)
    below = profile.capacity.get("host" if kind == "gpu" else "file", 0)
    if not device or not trace.saved:
        return None
    limit = int(FRAC * device)

    def plan(times: float) -> tuple[Trace, Plan] | None:
        larger = batch(trace, times)
        try:
            planned = make_plan(larger, link, limit=limit) if trace.measured else make_plan(larger, link, budget=limit)
        except LimitError:
            return None
        return (larger, planned) if not below or planned.forecast.out <= below else None

    def plain(times: float) -> bool:
        larger = batch(trace, times)
        return (plain_peak(larger) if trace.measured else larger.saved) <= limit

    def hidden(times: float) -> bool:
        found = plan(times)
        return found is not None and found[1].forecast.seconds <= SLOWER * found[0].seconds

    tests = (plain, hidden, lambda times: plan(times) is not None)
    return Largest(*(most(test, _LEAST, _MOST, 1.01) for test in tests))


def most(fits: Callable[[float], bool], low: float, high: float, step: float) -> float:
    """The largest factor between `low` and `high` that fits, to within the factor `step`; 0 if not even `low` does."""
    if not fits(low):
        return 0.0
    if fits(high):
        return high
    while high / low > step:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
