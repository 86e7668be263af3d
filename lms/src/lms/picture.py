"""The picture of one step: memory as a staircase, and under it the transfers below the computation that hides them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from lms.core.timeline import Lane, Span, Timeline
from lms.core.trace import Trace
from lms.drawing import BLUE, GREY, ORANGE, RED, encoded, figure, plain
from lms.units import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LANES: tuple[tuple[Lane, str, str], ...] = (
    ("compute", "compute", "#56B4E9"),
    ("out", "copies out", ORANGE),
    ("back", "copies back", "#009E73"),
    ("stall", "waiting", "#CC79A7"),
)
PLAIN, MANAGED, LIMIT = GREY, BLUE, RED
DETAIL = 2000  # steps of a curve, or bars of a lane: more are drawn as pixels, so that the file stays small


@dataclass(frozen=True)
class Curve:
    """A staircase: from each time (seconds) on, so many bytes, until `end`; `peak` is the most of them."""

    label: str
    points: tuple[tuple[float, int], ...]
    end: float
    peak: int


@dataclass(frozen=True)
class Picture:
    """All that is drawn. `limit` and `floor` are bytes, drawn as lines, the first under the name `limit_label`."""

    title: str
    curves: tuple[Curve, ...]
    spans: tuple[Span, ...] = ()
    limit: int | None = None
    limit_label: str = "limit"
    floor: int | None = None
    memory_label: str = "memory"


def plain_curve(trace: Trace, *, whole: bool, label: str = "plain") -> Curve:
    """Memory of the recorded pass with nothing moved; `whole` adds what the device held beside the saved bytes."""
    starts = [0.0, *accumulate(trace.times)]
    stretches = zip(starts, (0, *trace.live), trace.others, strict=False)
    return _curve(label, [(start, live + (other if whole else 0)) for start, live, other in stretches], starts[-1])


def managed_curve(trace: Trace, ran: Timeline, *, whole: bool, label: str = "with LMS") -> Curve:
    """Memory of a pass of `trace` as it ran, or was foreseen, with records swapped.

    `whole` adds what the device held beside the saved bytes in the same stretch of computation of the trace.
    """
    end = max([span.end for span in ran.spans] + [seconds for seconds, _ in ran.held], default=0.0)
    if not whole:
        return _curve(label, ran.held, end)
    computing = [span.start for span in ran.spans if span.lane == "compute"]
    stretches = list(zip(trace.times, trace.others, strict=True))
    if len(computing) != len(stretches):  # the simulator has no spans for stretches that take no time
        stretches = [stretch for stretch in stretches if stretch[0] > 0]
    rest = [(start, other) for start, (_, other) in zip(computing, stretches, strict=False)]
    times = sorted({seconds for seconds, _ in ran.held} | set(computing))
    return _curve(label, [(time, _level(ran.held, time) + _level(rest, time)) for time in times], end)


def draw(picture: Picture) -> Figure:
    """The picture as a matplotlib figure. Raises UsageError when matplotlib is not installed."""
    drawn = figure((10, 6 if picture.spans else 4.2))
    if picture.spans:
        memory, lanes = drawn.subplots(2, 1, sharex=True, height_ratios=(3, 1.25))
        _draw_lanes(lanes, picture.spans)
        bottom = lanes
    else:
        memory = bottom = drawn.subplots(1, 1)
    _draw_memory(memory, picture)
    bottom.set_xlabel("time since the pass began (s)")
    end = max([curve.end for curve in picture.curves] + [span.end for span in picture.spans], default=0.0)
    bottom.set_xlim(0, end or 1.0)
    memory.set_title(picture.title, loc="left", fontsize=11, fontweight="bold", pad=26)
    return drawn


def to_png(picture: Picture) -> bytes:
    """The picture as a PNG file."""
    return encoded(draw(picture), ".png")


def _draw_memory(axes: Axes, picture: Picture) -> None:
    for index, curve in enumerate(picture.curves):
        colour = (PLAIN, MANAGED)[min(index, 1)]
        points = [*curve.points, (curve.end, curve.points[-1][1] if curve.points else 0)]
        times, sizes = [seconds for seconds, _ in points], [nbytes / 1e9 for _, nbytes in points]
        pixels = len(points) > DETAIL
        alpha = (0.16, 0.30)[min(index, 1)]
        axes.fill_between(times, sizes, step="post", color=colour, alpha=alpha, linewidth=0, rasterized=pixels)
        label = f"{curve.label}: peak {format_size(curve.peak)}"
        axes.step(times, sizes, where="post", color=colour, linewidth=1.4, label=label, rasterized=pixels)
    if picture.limit is not None:
        label = f"{picture.limit_label}: {format_size(picture.limit)}"
        axes.axhline(picture.limit / 1e9, color=LIMIT, linestyle=(0, (6, 3)), linewidth=1.4, label=label)
    if picture.floor is not None:
        label = f"floor: {format_size(picture.floor)}"
        axes.axhline(picture.floor / 1e9, color="black", linestyle=":", linewidth=1.0, label=label)
    axes.set_ylabel(f"{picture.memory_label} (GB)")
    axes.set_ylim(bottom=0)
    axes.margins(y=0.12)
    plain(axes, "y")
    # Above the axes, where it hides nothing.
    axes.legend(loc="lower left", bbox_to_anchor=(-0.008, 1.0), ncols=4, frameon=False, fontsize=9, borderpad=0.2)


def _draw_lanes(axes: Axes, spans: Sequence[Span]) -> None:
    thin = max(span.end for span in spans) / DETAIL
    for row, (lane, _, colour) in enumerate(LANES):
        shown = [span for span in spans if span.lane == lane]
        if lane == "stall":  # every hook takes a little time: too little to be seen, unless it adds up
            short = [span for span in shown if span.end - span.start <= thin]
            if sum(span.end - span.start for span in short) < 0.01 * thin * DETAIL:
                shown = [span for span in shown if span.end - span.start > thin]
        bars = [(span.start, max(span.end - span.start, thin)) for span in shown]
        if bars:
            axes.broken_barh(
                bars,
                (row - 0.38, 0.76),
                facecolors=colour,
                edgecolor="white",
                linewidth=0,
                hatch="////" if lane == "stall" else None,  # told apart without any colour too
                rasterized=len(bars) > DETAIL,
            )
    axes.set_yticks(range(len(LANES)), [name for _, name, _ in LANES])
    axes.set_ylim(len(LANES) - 0.5, -0.5)
    plain(axes, "x")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _curve(label: str, points: Sequence[tuple[float, int]], end: float) -> Curve:
    """The curve with one step a time (the last) and none that changes nothing; its peak is that of all `points`."""
    steps: list[tuple[float, int]] = []
    for seconds, nbytes in points:
        if steps and steps[-1][0] == seconds:
            steps.pop()
        if not steps or steps[-1][1] != nbytes:
            steps.append((seconds, nbytes))
    return Curve(label, tuple(steps), end, max((nbytes for _, nbytes in points), default=0))


def _level(stairs: Sequence[tuple[float, int]], time: float) -> int:
    index = bisect_right(stairs, time, key=lambda stair: stair[0])
    return stairs[index - 1][1] if index else 0
