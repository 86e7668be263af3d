"""The common parts of all pictures: figures, their files, and plain axes.

The colours are those of Okabe and Ito, which people with any kind of colour blindness can tell apart.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Literal

from lms.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREY, RED = "#0072B2", "#E69F00", "#6E6E6E", "#D55E00"


def figure(size: tuple[float, float]) -> Figure:
    """An empty figure of so many inches. Raises UsageError when matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError(
            "a picture needs matplotlib, not installed here: pip install './lms[report]' in a copy of the repository"
        ) from None
    return Figure(figsize=size, layout="constrained")


def encoded(figure: Figure, suffix: str) -> bytes:
    """The figure as a file of the type `.png` or `.svg`. The same figure gives the same file."""
    import matplotlib

    buffer = io.BytesIO()
    # Text stays text: smaller, searchable, read by screen readers. Without the salt each file has other names in it.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "lms"}):
        figure.savefig(buffer, format=suffix[1:], dpi=150, metadata={"Date": None} if suffix == ".svg" else {})
    return buffer.getvalue()


def svg(figure: Figure) -> str:
    """The figure as an SVG element, for an HTML page."""
    text = encoded(figure, ".svg").decode()
    return text[text.index("<svg") :]


def plain(axes: Axes, grid: Literal["x", "y"], title: str = "") -> None:
    """Take away the frame and draw a faint grid."""
    axes.grid(axis=grid, linewidth=0.4, alpha=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    if title:
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=24)
