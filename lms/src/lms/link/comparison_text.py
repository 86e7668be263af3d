"""A comparison of two machines as text."""

from __future__ import annotations

from lms.link import table
from lms.link.comparison import SLOWER, Comparison, Prediction
from lms.link.profile import KINDS
from lms.link.series import Series
from lms.stats import format_seconds


def text(comparison: Comparison, *, speedup: float = 1.0) -> str:
    """The links side by side, then the pass on each machine, then notes."""
    one, other = comparison.one, comparison.other
    lines = [table.heading(one), table.heading(other), ""]
    rows: list[tuple[str, ...]] = [("link", "way", one.name, other.name, "ratio")]
    for row in comparison.rows:
        ratio = "-" if row.ratio is None else table.plain(row.ratio)
        rows.append((KINDS[row.kind], row.direction, _rate(row.one), _rate(row.other), ratio))
    lines += table.columns(rows, 2)
    if comparison.step is not None:
        lines += ["", *_step(comparison, *comparison.step, speedup)]
    lines += ["", *comparison.notes] if comparison.notes else []
    return "\n".join(lines)


def _rate(series: Series | None) -> str:
    if series is None:
        return "-"
    return table.rate(series.rate) + (f" ({series.via})" if not series.points else "")


def _step(comparison: Comparison, one: Prediction, other: Prediction, speedup: float) -> list[str]:
    faster = "" if speedup == 1.0 else f", its computation {speedup:.15g} times as fast as recorded"
    over = " and over ".join(dict.fromkeys(KINDS[side.kind] for side in (one, other)))
    lines = [
        f"one pass of the recorded step{faster}, over {over}",
        f"A: {comparison.one.name}",
        f"B: {comparison.other.name}",
    ]
    rows: list[tuple[str, ...]] = [
        ("may stay", *(f"{letter}: {word}" for letter in "AB" for word in ("pass", "waiting", "x plain"))),
    ]
    for ours, theirs in zip(one.shares, other.shares, strict=True):
        cells = [f"{ours.share:.0%}"]
        for side in (ours, theirs):
            cells += [format_seconds(side.seconds), format_seconds(side.stall), f"{side.slowdown:.2f}"]
        rows.append(tuple(cells))
    lines += [*table.columns(rows, 0), ""]
    rows = [("largest batch, times the recorded one", "A", "B")]
    words = ("nothing swapped", f"swapped, at most {SLOWER:.2f} x plain", "swapped, however long it takes")
    for word, name in zip(words, ("plain", "hidden", "most"), strict=True):
        rows.append((word, *(_times(side, name) for side in (one, other))))
    return lines + table.columns(rows, 1)


def _times(side: Prediction, name: str) -> str:
    if side.largest is None:
        return "not known"
    times = float(getattr(side.largest, name))
    return f"{table.plain(times)} x" if times else "none"
