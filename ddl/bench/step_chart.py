"""Training steps as a picture: the time of a step, the communication that compute does not hide, and the floor."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING

from steps import ALONE, Steps, rows

from ddl.planning.picture import COLOURS, figure_class, finish

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(steps: Mapping[str, Steps], bound: float, title: str) -> Figure:
    """The picture; `bound` is in seconds, 0 if there is none. Raises PictureError if matplotlib is missing."""
    shown = sorted(rows(steps, bound), key=lambda row: -row.step)  # the fastest above
    compute = median(steps[ALONE].seconds)
    figure = figure_class()(figsize=(9, 1.6 + 0.7 * len(shown)), layout="constrained")
    axes = figure.subplots()
    names = [row.name for row in shown]
    axes.barh(names, [min(row.step, compute) for row in shown], color=COLOURS[5], label="compute (no_sync)")
    beyond = [max(0.0, row.step - compute) for row in shown]
    axes.barh(names, beyond, left=compute, color=COLOURS[0], label="communication that compute does not hide")
    for at, row in enumerate(shown):
        taken = steps[row.name].seconds
        axes.plot(taken, [at] * len(taken), "|", color="black", markersize=10, label="each step" if at == 0 else None)
    if bound:
        axes.axvline(bound, color="black", linestyle=":", label="bound: no allreduce is faster")
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds a step, median")
    finish(axes, title, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.3), ncols=2)
    return figure
