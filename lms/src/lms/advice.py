"""Advice from the figures of a run: each piece with the figure that it rests on and the option to change. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lms.stats import Stats, format_seconds
from lms.units import format_size

# A run that is shorter says nothing: its first steps measure, plan and warm up.
LEAST_STEPS = 20
LEAST_SECONDS = 5.0

STALLED = 0.1  # share of the time that is worth an option
SLOWER = 1.5  # times the forecast
REPLANNED = 0.05  # of the passes
LEAST_REPLANS = 6  # measuring better makes some of them
LOW_PEAK = 0.6  # of the limit


@dataclass(frozen=True)
class Advice:
    """A piece of advice: its rule, the figure that it rests on, the option to change, and all of it in words."""

    rule: str
    figure: float
    option: str
    text: str


def advice(stats: Stats) -> list[Advice]:
    """What the figures support, the most pressing first; nothing if the run was too short to say.

    Nothing is said about losses: LMS does not change the mathematics.
    """
    if stats.steps < LEAST_STEPS or stats.elapsed < LEAST_SECONDS:
        return []
    found = (_stalls(stats), _link(stats), _shapes(stats), _room(stats))
    return [one for one in found if one is not None]


def as_figure(pieces: Sequence[Advice]) -> dict[tuple[str, ...], float]:
    """The advice as the figure of a metric with the labels rule and option: of each pair the most pressing."""
    return {(one.rule, one.option): one.figure for one in reversed(pieces)}


def _stalls(stats: Stats) -> Advice | None:
    waited = stats.stall_out + stats.stall_in + stats.state_stall
    share = min(1.0, waited / stats.elapsed)
    if share < STALLED:
        return None
    bound, option = (stats.limit, "limit") if stats.limit is not None else (stats.budget, "budget")
    now = f", now {format_size(bound)}," if bound is not None else ""
    return Advice(
        "stalls",
        share,
        option,
        f"{share:.0%} of the time ({format_seconds(waited)} of {format_seconds(stats.elapsed)}) went into waiting for "
        f"copies: raise --{option}{now} as far as the device allows; `lms plan` says what each limit costs",
    )


def _link(stats: Stats) -> Advice | None:
    step, foreseen = stats.step_time, stats.predicted_step_time
    moved = stats.swapped_out + stats.state_out
    if not step or not foreseen or not moved or step < SLOWER * foreseen:
        return None
    return Advice(
        "link",
        step / foreseen,
        "spill_dir",
        f"a step takes {format_seconds(step)}, {step / foreseen:.1f} times the {format_seconds(foreseen)} that the "
        "plan foresees: something else uses the link, the disk or the processors at the same time. Give --spill-dir a "
        "disk of its own, or run fewer jobs beside this one; `lms link measure` says what the links carry now",
    )


def _shapes(stats: Stats) -> Advice | None:
    often = stats.replans >= max(LEAST_REPLANS, REPLANNED * stats.passes)
    missed = stats.misses >= stats.passes > 0
    if not (often or missed):
        return None
    figure = max(stats.replans, stats.misses) / max(1, stats.passes)
    return Advice(
        "shapes",
        figure,
        "batch shapes",
        f"{stats.replans} new plans and {stats.misses} unforeseen copies back in {stats.passes} passes: the shapes of "
        "the batches change. Pad them to few sizes, sort them by size, and drop the last small one (drop_last=True)",
    )


def _room(stats: Stats) -> Advice | None:
    limit, peak = stats.limit, stats.peak
    moved = stats.swapped_out + stats.state_out
    if limit is None or peak is None or moved or not stats.saved or peak > LOW_PEAK * limit:
        return None
    # Saved bytes grow with the batch, and the rest stays.
    times = 1 + (limit - peak) / stats.saved
    return Advice(
        "room",
        peak / limit,
        "batch size",
        f"the peak is {format_size(peak)}, {peak / limit:.0%} of the limit of {format_size(limit)}, and nothing was "
        f"swapped: a batch of up to {_times(times)} the size should fit without swapping, as "
        f"{format_size(stats.saved)} are saved for the backward now",
    )


def _times(times: float) -> str:
    return f"{times:.1f} times" if times < 10 else f"{times:.0f} times"
