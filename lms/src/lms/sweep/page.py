"""What a sweep found: a table, a picture of peak memory against step time, and the page with both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lms.drawing import BLUE, GREY, ORANGE, figure, plain, svg
from lms.stats import format_seconds
from lms.sweep.runs import Row
from lms.units import format_size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADER = ("run", "bound", "peak", "x plain", "step", "x plain", "moved out", "")
_MARKS = {"plain": (GREY, "s"), "lms": (BLUE, "o"), "beside": (ORANGE, "^")}
_NAMES = {"plain": "plain", "lms": "LMS", "beside": "beside it"}


def cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """A tuple for each row, in the order of `HEADER`; "-" for what was not measured."""
    base = next((row for row in rows if row.kind == "plain"), None)
    found: list[tuple[str, ...]] = []
    for row in rows:
        found.append(
            (
                row.name,
                row.bound or "-",
                format_size(row.peak) if row.peak is not None else "-",
                _over(row.peak, base.peak if base else None),
                format_seconds(row.step) if row.step is not None else "-",
                _over(row.step, base.step if base else None),
                format_size(row.moved) if row.moved is not None else "-",
                row.note,
            )
        )
    return found


def _over(value: float | None, base: float | None) -> str:
    return f"{value / base:.2f}" if value is not None and base else "-"


def text(rows: Sequence[Row]) -> str:
    """The table for a terminal."""
    table = [HEADER, *cells(rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for name, *middle, note in table:
        right = "  ".join(cell.rjust(width) for cell, width in zip(middle, widths[1:-1], strict=True))
        lines.append(f"{name.ljust(widths[0])}  {right}  {note}".rstrip())
    return "\n".join(lines)


def draw(rows: Sequence[Row]) -> Figure:
    """Each run as a point: to the left is less memory, below is less time. Raises UsageError without matplotlib."""
    drawn = figure((9, 5))
    axes = drawn.subplots(1, 1)
    axes.margins(0.15)
    measured = [row for row in rows if row.peak is not None and row.step is not None]
    rightmost = max(((row.peak or 0) / 1e9 for row in measured), default=0.0)
    for kind, (colour, marker) in _MARKS.items():
        shown = [row for row in measured if row.kind == kind]
        if not shown:
            continue
        places = sorted(((row.peak or 0) / 1e9, row.step or 0.0) for row in shown)
        line = "-" if kind == "lms" else ""
        axes.plot(*zip(*places, strict=True), color=colour, marker=marker, linestyle=line, label=_NAMES[kind])
        for row in shown:
            place = ((row.peak or 0) / 1e9, row.step or 0.0)
            # A long name must not leave the picture.
            shift, align = ((-6, 6), "right") if place[0] > 0.7 * rightmost else ((6, 6), "left")
            axes.annotate(row.name, place, shift, textcoords="offset points", ha=align, fontsize=9, color=colour)
    axes.set_xlabel("peak memory of the whole run (GB)")
    axes.set_ylabel("step (s, median)")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    plain(axes, "y")
    if measured:
        axes.legend(loc="lower left", bbox_to_anchor=(-0.008, 1.0), ncols=3, frameon=False, fontsize=9, borderpad=0.2)
    return drawn


def render(rows: Sequence[Row], *, title: str, command: str) -> str:
    """The page, as one self-contained HTML document. Raises UsageError without jinja2 or matplotlib."""
    from lms.report import template

    return template("sweep.html").render(
        title=title, command=command, svg=svg(draw(rows)), header=HEADER, rows=cells(rows)
    )
