"""The figures as a picture: time against size, with the bound."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from typing import TYPE_CHECKING

from ddl.bench.contest import Turns
from ddl.bench.figures import Bound
from ddl.planning.picture import colour, figure_class, finish, label_sizes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(turns: Sequence[Turns], bound: Bound | None, title: str) -> Figure:
    """The picture. Raises PictureError if matplotlib is missing."""
    names = list(dict.fromkeys(one.name for one in turns))
    sizes = sorted({one.size for one in turns})
    timed = {(one.name, one.size): one for one in turns}
    figure = figure_class()(figsize=(9, 5.2), layout="constrained")
    axes = figure.subplots()
    for at, name in enumerate(names):
        theirs = [timed.get((name, size)) for size in sizes]  # a gap at sizes at which it was not timed
        middle = [one.median if one else nan for one in theirs]
        axes.plot(sizes, middle, "o-", label=name, color=colour(at), linewidth=2.2 - 1.2 * (at > 0))
        low, high = ([edge(one.seconds.values()) if one else nan for one in theirs] for edge in (min, max))
        axes.fill_between(sizes, low, high, color=colour(at), alpha=0.15, linewidth=0)
    if bound is not None:
        axes.plot(sizes, [bound(size) for size in sizes], "k:", label="bound: no algorithm is faster")
    label_sizes(axes, sizes)
    axes.set_ylabel("seconds an allreduce, median (band: all rounds)")
    finish(axes, title)
    return figure
