"""What a sweep prints and draws."""

import pytest

from lms.sweep.page import draw, render, text
from lms.sweep.runs import Row

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

MB = 10**6
ROWS = [
    Row("plain", "plain", "", 1000 * MB, 2.0, 10),
    Row("LMS 50%", "lms", "budget 300 MB", 700 * MB, 2.5, 10, 200 * MB),
    Row("LMS 1GB", "lms", "limit 1 GB", note="its limit is <below> the floor"),
    Row("train.py --checkpoint", "beside", "", 600 * MB, 3.0, 10),
]


def test_the_table_has_each_run_over_plain_and_why_one_failed() -> None:
    header, *lines = [line.split("  ") for line in text(ROWS).splitlines()]
    found = [[cell.strip() for cell in line if cell.strip()] for line in (header, *lines)]
    assert found == [
        ["run", "bound", "peak", "x plain", "step", "x plain", "moved out"],
        ["plain", "-", "1 GB", "1.00", "2 s", "1.00", "-"],
        ["LMS 50%", "budget 300 MB", "700 MB", "0.70", "2.5 s", "1.25", "200 MB"],
        ["LMS 1GB", "limit 1 GB", "-", "-", "-", "-", "-", "its limit is <below> the floor"],
        ["train.py --checkpoint", "-", "600 MB", "0.60", "3 s", "1.50", "-"],
    ]


def test_without_plain_there_is_nothing_to_compare_with() -> None:
    assert "0.70" not in text(ROWS[1:])


def test_the_plot_has_a_named_point_for_each_run_with_figures() -> None:
    (axes,) = draw(ROWS).axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
    assert lines == {"plain": [[1.0, 2.0]], "LMS": [[0.7, 2.5]], "beside it": [[0.6, 3.0]]}
    assert {note.get_text() for note in axes.texts} == {"plain", "LMS 50%", "train.py --checkpoint"}
    assert draw([]).axes, "an interrupted sweep can be drawn"


def test_the_page_has_table_and_plot_and_makes_no_markup_of_what_runs_say() -> None:
    page = render(ROWS, title="train.py", command="lms sweep train.py")
    assert page.count("<svg") == 1
    assert "<td>its limit is &lt;below&gt; the floor</td>" in page
    assert '<td class="n">1.25</td>' in page
