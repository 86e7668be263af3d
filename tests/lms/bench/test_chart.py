"""The benchmark's picture shows every cell that ran, beside plain."""

from __future__ import annotations

import pytest
from figures import Cell, Step

matplotlib = pytest.importorskip("matplotlib")
import chart  # noqa: E402 - it imports matplotlib
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

MB = 10**6
GREY, ORANGE, BLUE, RED = "#6E6E6E", "#E69F00", "#0072B2", "#D55E00"


def cell(name: str, kind: str, seconds: list[float], peak: int = 100 * MB, share: float | None = None) -> Cell:
    """The first step is the warm-up."""
    session = {"held_at_floor": 30.0 * MB} if kind == "lms" else {}
    steps = [Step(value, value, "0x1p0", "abc", peak, session=session) for value in (99.0, *seconds)]
    return Cell(name, kind, share, warm=1, steps=steps)


def cells(*more: Cell) -> dict[str, Cell]:
    every = [cell("plain", "plain", [1.0, 2.0]), cell("plain-again", "plain", [1.2, 2.0]), *more]
    return {one.name: one for one in every}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were made."""
    figures: list[Figure] = []

    class Noted(Figure):
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)
            figures.append(self)

    monkeypatch.setattr(chart, "Figure", Noted)
    return figures


def names(axes: Axes) -> list[str]:
    return [label.get_text() for label in axes.get_yticklabels()]


def labels(axes: Axes) -> list[str]:
    legend = axes.get_legend()
    return [] if legend is None else [text.get_text() for text in legend.get_texts()]


def test_each_model_has_a_row_and_each_cell_that_ran_a_place_in_it(drawn: list[Figure]) -> None:
    ran, stopped = cell("lms-35%", "lms", [1.5, 3.0], share=0.35), cell("swap", "plain", [])
    content = chart.draw({"gpt": cells(ran, stopped), "unet": cells()})
    assert content.startswith(b"\x89PNG")
    (figure,) = drawn
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == [
        "gpt: step time over plain's", "gpt: resident peak, MB", "unet: step time over plain's",
        "unet: resident peak, MB",
    ]  # fmt: skip
    for axes in figure.axes[:2]:
        assert names(axes) == ["plain", "plain-again", "lms-35%"]
        assert axes.yaxis_inverted(), "the first is on top"


def test_step_times_are_those_over_plains_of_the_same_round_around_their_median(drawn: list[Figure]) -> None:
    chart.draw({"gpt": cells(cell("checkpoint", "checkpoint", [1.5, 4.0]))})
    left = drawn[0].axes[0]
    dots = [tuple(line.get_xdata()) for line in left.lines if line.get_marker() == "."]
    assert dots == [(1.0, 1.0), (1.2, 1.0), (1.5, 2.0)]
    medians = [float(line.get_xdata()[0]) for line in left.lines if line.get_marker() == "|"]
    assert medians == pytest.approx([1.0, 1.1, 1.75])
    (floor,) = (patch for patch in left.patches if patch.get_label() == "noise floor")
    assert floor.get_extents().transformed(left.transData.inverted()).width == pytest.approx(0.3)


def test_memory_is_in_megabytes_beside_the_floor_where_a_cell_with_share_0_ran(drawn: list[Figure]) -> None:
    all_out = cell("lms-0%", "lms", [1.0, 2.0], peak=80 * MB, share=0.0)
    chart.draw({"with": cells(all_out), "without": cells()})
    _, with_floor, _, without = drawn[0].axes
    assert [bar.get_width() for bar in with_floor.patches] == [100, 100, 80]
    assert labels(with_floor) == ["floor"]
    (line,) = with_floor.lines
    assert list(line.get_xdata()) == [50, 50], "the peak less what LMS held in its moment"
    assert labels(without) == []


def test_plain_on_the_systems_swap_has_another_colour_than_plain(drawn: list[Figure]) -> None:
    shown = cells(cell("checkpoint", "checkpoint", [1.0]), cell("lms-fits", "lms", [1.0]), cell("swap", "plain", [1.0]))
    chart.draw({"gpt": shown})
    colours = [matplotlib.colors.to_hex(bar.get_facecolor()).upper() for bar in drawn[0].axes[1].patches]
    assert colours == [GREY, GREY, ORANGE, BLUE, RED]
