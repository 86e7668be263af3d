"""The figures as a picture: time against size, and how near each contestant is to the bound."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ddl.bench.contest import Turns
from ddl.bench.figures import Links, bound, human
from ddl.launch.errors import CheckError

# Okabe and Ito's colours, which people with any kind of colour blindness can tell apart; DDL's is the darkest.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6E6E6E", "#F0E442")


def draw(turns: Sequence[Turns], links: Links | None, title: str, path: Path) -> None:
    """Write a picture to `path` (.png or .svg). Raises CheckError where matplotlib is missing or the file cannot be."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise CheckError("--plot needs matplotlib: pip install 'bascule-ddl[plot]'") from None
    names = list(dict.fromkeys(one.name for one in turns))
    sizes = sorted({one.size for one in turns})
    figure = Figure(figsize=(9, 5.2), layout="constrained")
    axes = figure.subplots()
    for at, name in enumerate(names):
        theirs = sorted((one for one in turns if one.name == name), key=lambda one: one.size)
        where = [one.size for one in theirs]
        colour = _COLOURS[at % len(_COLOURS)]
        axes.plot(where, [one.median for one in theirs], "o-", label=name, color=colour, linewidth=2.2 - 1.2 * (at > 0))
        low, high = ([edge(one.seconds.values()) for one in theirs] for edge in (min, max))
        axes.fill_between(where, low, high, color=colour, alpha=0.15, linewidth=0)
    if links is not None:
        axes.plot(sizes, [bound(links, size) for size in sizes], "k:", label="bound: no algorithm is faster")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [human(size) for size in sizes], rotation=45)
    axes.set_ylabel("seconds an allreduce, median (band: all rounds)")
    axes.set_title(title, loc="left")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:  # ValueError: a kind of file that matplotlib does not know
        raise CheckError(f"--plot {path}: {error}; expected a file that ends in .png or .svg") from None
