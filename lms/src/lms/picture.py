"""The picture of one step: memory as a staircase, and under it the transfers below the computation that hides them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
DETAIL = 2000  # steps across the picture: more cannot be seen, and would swell the file


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
    seconds, points, live = 0.0, [], 0
    for access, after in zip(trace.accesses, trace.live, strict=True):
        points.append((seconds, live + (access.other if whole else 0)))
        seconds += access.seconds
        live = after
    points.append((seconds, live + (trace.tail_other if whole else 0)))
    return _curve(label, points, seconds + trace.tail)


def managed_curve(trace: Trace, ran: Timeline, *, whole: bool, label: str = "with LMS") -> Curve:
    """Memory of a pass of `trace` as it ran, or was foreseen, with records swapped.

    `whole` adds what the device held beside the saved bytes in the same stretch of computation of the trace.
    """
    end = max([span.end for span in ran.spans] + [seconds for seconds, _ in ran.held], default=0.0)
    if not whole:
        return _curve(label, ran.held, end)
    computing = [span.start for span in ran.spans if span.lane == "compute"]
    stretches = [(access.seconds, access.other) for access in trace.accesses] + [(trace.tail, trace.tail_other)]
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
        points = _thin_steps(curve.points, curve.end)
        times = [seconds for seconds, _ in points] + [curve.end]
        sizes = [nbytes / 1e9 for _, nbytes in points] + [points[-1][1] / 1e9 if points else 0.0]
        if not points:
            sizes = [0.0]
        axes.fill_between(times, sizes, step="post", color=colour, alpha=(0.16, 0.30)[min(index, 1)], linewidth=0)
        label = f"{curve.label}: peak {format_size(curve.peak)}"
        axes.step(times, sizes, where="post", color=colour, linewidth=1.4, label=label)
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
    end = max(span.end for span in spans)
    for row, (lane, _, colour) in enumerate(LANES):
        bars = _merge(((span.start, span.end) for span in spans if span.lane == lane), end / DETAIL)
        if lane == "stall":  # every hook takes a little time, too little to be seen
            bars = [(start, stop) for start, stop in bars if stop - start > end / DETAIL]
        if bars:
            pieces = [(start, max(stop - start, end / DETAIL)) for start, stop in bars]
            hatch = "////" if lane == "stall" else None  # told apart without any colour too
            axes.broken_barh(pieces, (row - 0.38, 0.76), facecolors=colour, edgecolor="white", linewidth=0, hatch=hatch)
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


def _thin_steps(points: Sequence[tuple[float, int]], end: float) -> list[tuple[float, int]]:
    """The staircase with at most two steps in each of DETAIL pieces of time: the highest, for the peak; the last."""
    if len(points) <= DETAIL or end <= 0:
        return list(points)
    pieces: dict[int, list[tuple[float, int]]] = {}
    for point in points:
        pieces.setdefault(int(point[0] / end * DETAIL), []).append(point)
    thinned: list[tuple[float, int]] = []
    for piece in pieces.values():
        highest = max(range(len(piece)), key=lambda index: piece[index][1])
        thinned.extend(piece[index] for index in sorted({highest, len(piece) - 1}))
    return thinned


def _merge(bars: Iterable[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    """The bars in order, those closer than `gap` joined."""
    merged: list[tuple[float, float]] = []
    for start, stop in sorted(bars):
        if merged and start - merged[-1][1] < gap:
            merged[-1] = merged[-1][0], max(merged[-1][1], stop)
        else:
            merged.append((start, stop))
    return merged
