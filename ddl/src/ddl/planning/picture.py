"""Forecasts as pictures: time against size for each plan with the bound, and speedup against GPUs. Needs matplotlib.

The colours are Okabe and Ito's: people with any kind of colour blindness can tell them apart.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddl import elements
from ddl.launch import output
from ddl.planning import interface
from ddl.planning.interface import Plan
from ddl.planning.network import Network
from ddl.planning.units import format_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#6E6E6E", "#F0E442")


class PictureError(ValueError):
    """A picture cannot be made. The message says what to install, or which suffix is expected."""


def check(path: Path) -> None:
    """Raises PictureError if a picture could not be written to `path`. Call it before computing anything."""
    if path.suffix not in SUFFIXES:
        raise PictureError(f"{path}: a picture ends in {' or '.join(SUFFIXES)}")
    figure_class()


def draw_times(network: Network, dtype: str, plan: Plan | None) -> Figure:
    """Time of an allreduce against its size: the library's choice, each other plan, and the bound."""
    tree, element = network.tree, elements.TYPES[dtype].nbytes
    sizes = [1 << power for power in range(10, 31)]
    curves: dict[str, dict[int, float]] = {}
    ours = []
    for size in sizes:
        count = max(1, size // element)
        found = interface.alternatives(tree, count, dtype)
        mine = interface.forecast(tree, count, dtype, plan) if plan else found[0]
        ours.append(mine.seconds)
        for one in found:
            label = "recursive halving, doubling" if one.algorithm.startswith("recursive") else one.plan
            curve = curves.setdefault(label, {})
            curve[size] = min(one.seconds, curve.get(size, one.seconds))  # one plan is also listed without chunks
    figure = figure_class()(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots()
    bound = [interface.bounds(tree, size).cut for size in sizes]
    axes.plot(sizes, bound, color="black", linestyle=":", label="bound of any algorithm (cut)")
    for at, (label, points) in enumerate(sorted(curves.items()), start=1):
        axes.plot(*zip(*sorted(points.items()), strict=True), color=colour(at), linewidth=1, label=label)
    label = "as asked for" if plan else "what the library does"
    axes.plot(sizes, ours, color=colour(0), linewidth=3, alpha=0.5, label=label)
    label_sizes(axes, sizes[::2])
    axes.set_xlabel("size of the allreduce")
    axes.set_ylabel("time (s), simulated")
    finish(axes, f"{network.name or 'described network'}, {network.ranks:,} ranks: SIMULATION")
    return figure


def draw_scaling(curves: Mapping[str, Sequence[tuple[int, float]]], title: str, base: int) -> Figure:
    """Speedup over `base` GPUs against the number of GPUs, and the efficiency below; `curves` by label."""
    figure = figure_class()(figsize=(9, 7), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    gpus = sorted({count for points in curves.values() for count, _ in points})
    upper.plot(gpus, [count / base for count in gpus], color="black", linestyle=":", label="linear")
    for at, (label, points) in enumerate(curves.items()):
        counts, speedups = zip(*points, strict=True)
        upper.plot(counts, speedups, "o-", color=colour(at), markersize=4, label=label)
        lower.plot(counts, [100 * s * base / c for c, s in points], "o-", color=colour(at), markersize=4)
    for axes in (upper, lower):
        axes.set_xscale("log", base=2)
        axes.set_xticks(gpus, [str(count) for count in gpus])
    upper.set_yscale("log", base=2)
    upper.set_ylabel(f"speedup over {base} GPUs")
    lower.set_ylabel("efficiency (%)")
    lower.set_xlabel("GPUs")
    finish(upper, title)
    finish(lower)
    return figure


def write(figure: Figure, path: Path) -> None:
    """Write the picture, as `output.write` does. The same picture gives the same bytes."""
    import matplotlib

    content = io.BytesIO()
    metadata = {"Date": None} if path.suffix == ".svg" else None
    # Text stays text: smaller, searchable, read by screen readers.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "ddl"}):
        figure.savefig(content, format=path.suffix[1:], dpi=120, metadata=metadata)
    output.write(path, content.getvalue())


def colour(at: int) -> str:
    """The colour of curve number `at`."""
    return COLOURS[at % len(COLOURS)]


def label_sizes(axes: Axes, sizes: Sequence[int]) -> None:
    """Have sizes in bytes and seconds on logarithmic axes."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [format_size(size) for size in sizes], rotation=45, ha="right")


def finish(axes: Axes, title: str = "", **legend: Any) -> None:
    """The title, the grid and the frame; with a title, a legend, too."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
    if title:
        axes.set_title(title, loc="left")
        axes.legend(frameon=False, **legend)


def figure_class() -> type[Figure]:
    """Matplotlib's Figure. Raises PictureError if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PictureError(
            "a picture needs matplotlib, not installed here: pip install './ddl[plot]' in a copy of the repository"
        ) from None
    return Figure
