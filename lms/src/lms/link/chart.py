"""Pictures of links: two machines side by side, and the GPUs of one machine with the links between them.

Colours are never the only difference: hatches, markers or words repeat it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import cos, pi, sin
from pathlib import Path
from typing import TYPE_CHECKING

from lms.drawing import BLUE, GREY, ORANGE, figure, plain
from lms.errors import UsageError
from lms.link import table
from lms.link.comparison import Comparison, Prediction, Row
from lms.link.gpu import Gpu
from lms.link.profile import KINDS
from lms.link.series import Series
from lms.link.watch import Watched
from lms.units import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ONE, OTHER, PLAIN = BLUE, ORANGE, GREY
SUFFIXES = (".png", ".svg")


def check(path: Path) -> None:
    """Raise UsageError if the suffix of `path` is of no known picture format."""
    if path.suffix not in SUFFIXES:
        raise UsageError(f"--picture={str(path)!r}: expected a name that ends with {' or '.join(SUFFIXES)}")


def draw_comparison(comparison: Comparison, *, speedup: float = 1.0) -> Figure:
    """Left: the rate of each kind of link on both machines. Right, with a trace: the time of its pass on each."""
    drawn = figure((11.5 if comparison.step else 6.5, 4.6))
    axes = drawn.subplots(
        1, 2 if comparison.step else 1, squeeze=False, width_ratios=(1.15, 1)[: 1 + bool(comparison.step)]
    )[0]
    _draw_rates(axes[0], comparison)
    if comparison.step is not None:
        _draw_step(axes[1], comparison, comparison.step, speedup)
    return drawn


def _draw_rates(axes: Axes, comparison: Comparison) -> None:
    rows = _merged([row for row in comparison.rows if row.direction != "both"])
    labels = []
    for at, (label, row) in enumerate(rows):
        ratio = row.ratio
        labels.append(label if ratio is None else f"{label}\n{_ratio(ratio)}")
        found = [side.rate / 1e9 for side in (row.one, row.other) if side is not None]
        axes.plot([min(found), max(found)], [at, at], color=PLAIN, linewidth=0.8, zorder=1)
        for side, colour, marker, shift in ((row.one, ONE, "o", 8), (row.other, OTHER, "s", -9)):
            if side is None:
                continue
            face, place = colour if side.points else "white", (side.rate / 1e9, at)  # hollow: described, not measured
            axes.scatter(*place, s=52, marker=marker, facecolors=face, edgecolors=colour, linewidths=1.8, zorder=2)
            align = "bottom" if shift > 0 else "top"
            axes.annotate(_tag(side), place, (0, shift), textcoords="offset points", ha="center", va=align, fontsize=8)
    axes.set_xscale("log")
    axes.margins(x=0.25)
    axes.set_yticks(range(len(rows)), labels, fontsize=9)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel("GB/s, each way (log)")
    axes.xaxis.set_major_formatter(lambda value, _: table.plain(value))
    plain(axes, "x", "What the links carry")
    for name, colour, marker in zip(_names(comparison), (ONE, OTHER), "os", strict=True):
        axes.plot([], [], color=colour, marker=marker, linestyle="", label=name)
    axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=2, frameon=False, fontsize=8.5, borderpad=0.1)


def _merged(rows: Sequence[Row]) -> list[tuple[str, Row]]:
    """The rows with their labels; out and back become one row if they are equal on both machines."""
    found: list[tuple[str, Row]] = []
    for row in rows:
        label = KINDS[row.kind]
        if row.direction == "back" and found and found[-1][1].kind == row.kind and _same(found[-1][1], row):
            found[-1] = (label, found[-1][1])
        else:
            found.append((label if row.direction == "copy" else f"{label}, {row.direction}", row))
    return found


def _same(one: Row, other: Row) -> bool:
    pairs = ((one.one, other.one), (one.other, other.other))
    return all((a is None) == (b is None) and (a is None or b is None or a.rate == b.rate) for a, b in pairs)


def _tag(series: Series) -> str:
    return f"{format_size(series.rate)}/s{'' if series.points else f', {_plain(series.via)}'}"


def _names(comparison: Comparison) -> tuple[str, str]:
    return _plain(comparison.one.name), _plain(comparison.other.name)


def _plain(text: str) -> str:
    """Text from outside, which Matplotlib would else read as mathematics between two dollar signs."""
    return text.replace("$", r"\$")


def _ratio(ratio: float) -> str:
    return f"{table.plain(ratio)} : 1" if ratio >= 1 else f"1 : {table.plain(1 / ratio)}"


def _draw_step(axes: Axes, comparison: Comparison, step: tuple[Prediction, Prediction], speedup: float) -> None:
    for side, name, colour, marker in zip(step, _names(comparison), (ONE, OTHER), "os", strict=True):
        shares = [100 * one.share for one in side.shares]
        axes.plot(shares, [one.slowdown for one in side.shares], color=colour, marker=marker, label=name, linewidth=1.8)
    axes.axhline(1.0, color=PLAIN, linestyle=":", linewidth=1.2)
    axes.invert_xaxis()
    axes.set_ylim(bottom=0)
    axes.set_xlabel("saved bytes that may stay in the device (%)")
    axes.set_ylabel("pass over its computation alone")
    plain(axes, "y", "What a pass of the recorded step takes")
    if speedup != 1.0:
        faster = f"its computation {speedup:.15g} times as fast as recorded"
        axes.annotate(faster, (0, 1), xytext=(0, 8), xycoords="axes fraction", textcoords="offset points", fontsize=8.5)
    axes.legend(loc="upper left", frameon=False, fontsize=8.5)


def draw_watched(watched: Watched) -> Figure:
    """The machine's counters over time: bytes a second out and back."""
    drawn = figure((10, 2.6))
    axes = drawn.subplots(1, 1)
    edges = [sample.start for sample in watched.samples] + [watched.samples[-1].end]
    for way, colour, style in (("out", ONE, "-"), ("back", OTHER, "--")):
        rates = []
        for sample in watched.samples:
            nbytes = sample.out if way == "out" else sample.back
            rates.append(float("nan") if nbytes is None else nbytes / max(sample.end - sample.start, 1e-9) / 1e9)
        axes.stairs(rates, edges, color=colour, linestyle=style, linewidth=1.3, label=way)
    axes.set_ylabel("counted (GB/s)")
    axes.set_xlabel("time since the session began (s)")
    axes.set_ylim(bottom=0)
    plain(axes, "y")
    axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=2, frameon=False, fontsize=9, borderpad=0.1)
    return drawn


def draw_topology(gpus: Sequence[Gpu], matrix: Sequence[Sequence[str]], title: str) -> Figure:
    """The GPUs in a ring, a line for each pair, thicker for more NVLinks, and each GPU's link to its host."""
    drawn = figure((7.5, 6.5))
    axes = drawn.subplots(1, 1)
    count = len(gpus)
    places = [(sin(2 * pi * at / count), cos(2 * pi * at / count)) if count > 1 else (0.0, 0.0) for at in range(count)]
    for one, other in combinations(range(count), 2):
        words, ((x0, y0), (x1, y1)) = matrix[one][other], (places[one], places[other])
        links = int(words[2:]) if words.startswith("NV") else 0
        colour, style, width = (ONE, "-", 1 + links / 4) if links else (PLAIN, ":", 0.8)
        axes.plot([x0, x1], [y0, y1], color=colour, linewidth=width, linestyle=style, zorder=1)
        _label(axes, ((x0 + x1) / 2, (y0 + y1) / 2), words, colour, facecolor="white", edgecolor="none", pad=1)
    for gpu, place in zip(gpus, places, strict=True):
        words, ceiling = gpu.host()
        most = f"\nat most {format_size(ceiling.out)}/s each way" if ceiling is not None else ""
        node = f", node {gpu.node}" if gpu.node is not None else ""
        text = f"GPU {gpu.index}: {_plain(gpu.name)}\n{words}{node}{most}"
        _label(axes, place, text, "black", boxstyle="round", facecolor="#F4F8FB", edgecolor=ONE)
    axes.set_xlim(-1.6, 1.6)
    axes.set_ylim(-1.35, 1.35)
    axes.axis("off")
    axes.set_title(_plain(title), loc="left", fontsize=11, fontweight="bold")
    return drawn


def _label(axes: Axes, place: tuple[float, float], text: str, colour: str, **box: object) -> None:
    """Text in a box, in the middle of a place."""
    axes.text(*place, text, fontsize=8, ha="center", va="center", color=colour, bbox=box)
