"""The benchmark as a picture: step time and memory of every cell, beside plain."""

from __future__ import annotations

import io
from collections.abc import Mapping

from figures import Cell, floor_of, noise_floor, paired, spread
from matplotlib.figure import Figure

# Okabe and Ito's colours, which people with any kind of colour blindness can tell apart.
_COLOURS = {
    "plain": "#6E6E6E",
    "pool": "#009E73",
    "jemalloc": "#CC79A7",
    "checkpoint": "#E69F00",
    "lms": "#0072B2",
    "swap": "#D55E00",
}


def draw(models: Mapping[str, Mapping[str, Cell]]) -> bytes:
    """A PNG: a row for each model, step time over plain on the left, peak memory on the right."""
    figure = Figure(figsize=(11, 0.6 + 3.2 * len(models)), layout="constrained")
    axes = figure.subplots(len(models), 2, squeeze=False)
    for (model, cells), (left, right) in zip(models.items(), axes, strict=True):
        shown = [cell for cell in cells.values() if cell.timed]
        places = range(len(shown))
        colours = [_COLOURS["swap" if cell.name == "swap" else cell.kind] for cell in shown]
        noise = noise_floor(paired(cells["plain-again"], cells["plain"]))
        left.axvspan(1 - noise, 1 + noise, color="#DDDDDD", label="noise floor")
        left.axvline(1, color="#6E6E6E", linewidth=1)
        for place, cell, colour in zip(places, shown, colours, strict=True):
            ratios = paired(cell, cells["plain"])
            left.plot(ratios, [place] * len(ratios), ".", color=colour, alpha=0.4)
            left.plot(spread(ratios).median, place, "|", color=colour, markersize=16, markeredgewidth=3)
        left.set_title(f"{model}: step time over plain's", loc="left")
        left.legend(frameon=False)
        right.barh(places, [cell.peak / 1e6 for cell in shown], color=colours)
        floor = floor_of(shown)
        if floor is not None:
            right.axvline(floor / 1e6, color="black", linestyle=":", label="floor")
            right.legend(frameon=False)
        right.set_title(f"{model}: resident peak, MB", loc="left")
        for axis in (left, right):
            axis.set_yticks(places, [cell.name for cell in shown])
            axis.invert_yaxis()
            axis.spines[["top", "right"]].set_visible(False)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=120)
    return content.getvalue()
