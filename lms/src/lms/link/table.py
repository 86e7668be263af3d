"""Profiles as text: each link with its ceiling, its measured series, and notes for the reader."""

from __future__ import annotations

from collections.abc import Sequence
from math import floor, log10

from lms.link.profile import MeasuredLink, Profile
from lms.link.series import Series
from lms.stats import format_seconds
from lms.units import format_size


def rate(bytes_per_second: float) -> str:
    """`1.25 GB/s`."""
    return f"{format_size(bytes_per_second)}/s"


def plain(number: float) -> str:
    """`0.0125`, `12.5`, `1250`: three significant digits or more, never as a power of ten."""
    decimals = max(0, 2 - floor(log10(abs(number)))) if number else 0
    text = f"{number:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if decimals else text


def columns(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """The rows as lines, the first `left` columns to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if at < left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def text(profile: Profile) -> str:
    """The whole profile."""
    return "\n".join([heading(profile), "", *body(profile)])


def heading(profile: Profile) -> str:
    """Which machine, and whose figures."""
    origin = f"measured {profile.when}".rstrip() if profile.origin == "measured" else "described, not measured"
    return f"{profile.name}: {origin}"


def body(profile: Profile) -> list[str]:
    """A line for each way over each link, a description and notes for each link, and a line for each absent one."""
    rows: list[tuple[str, ...]] = [("link", "way", "by", "rate", "±", "of its ceiling", "latency", "sizes")]
    rows += [_row(link, series) for link in profile.links for series in link.series]
    lines = [*columns(rows, 3), ""] if len(rows) > 1 else []
    for link in profile.links:
        ceiling = link.ceiling
        most = ""
        if ceiling is not None:
            rates = rate(ceiling.out) if ceiling.out == ceiling.back else f"{rate(ceiling.out)}, {rate(ceiling.back)}"
            most = f"; at most {rates} each way ({ceiling.source})"
        lines.append(f"{link.name}: {link.what}{most}")
        lines += [f"  {note}" for note in link.notes]
    if profile.origin != "measured" and (source := profile.machine.get("source")):
        lines += ["", f"capacity: {source}"]
    if profile.absent:
        lines += ["", *(f"not here: {one.what}: {one.why}" for one in profile.absent)]
    return lines


def _row(link: MeasuredLink, series: Series) -> tuple[str, ...]:
    share = f"{series.rate / link.ceiling.of(series.direction):.0%}" if link.ceiling is not None else "not known"
    measured = bool(series.points)
    sizes = "nominal"
    if measured:
        sizes = f"{format_size(series.points[0].nbytes)} to {format_size(series.points[-1].nbytes)}"
    return (
        link.name,
        series.direction,
        series.via,
        rate(series.rate),
        f"{series.spread:.0%}" if measured else "-",
        share if measured else "-",
        format_seconds(series.latency) if series.latency else "-",
        sizes,
    )
