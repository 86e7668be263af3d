from __future__ import annotations

from pathlib import Path
from typing import Any

import pictures
import pytest
from pictures import Report

from lms.core.timeline import Span
from lms.core.trace import Access, Tensor
from lms.errors import UsageError
from lms.link import Link
from lms.picture import Picture
from lms.trace import Trace

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

MB = 10**6
SPAN: Any = {"lane": "out", "start": 0.5, "end": 0.75, "nbytes": 100, "record": 0}


def report(peak: int, device: str = "cpu", **more: object) -> Report:
    """What train.py would write for two steps."""
    step = {"loss": 2.5, "dice": [0.5], "seconds": 2.0}
    whole: Any = {
        "device": device,
        "parameters": 7,
        "steps": [{"step": 1, "peak": 9000 * MB, **step}, {"step": 2, "peak": peak, **step}],
        "sha256": {},
        "memory": [(0.0, 300 * MB), (1.0, 700 * MB), (2.0, 400 * MB)],
        "mapped_peak": 0,
        "lms": {},
        "timeline": None,
    }
    return whole | more


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The demo's folder, with the trace of a pass in it."""
    trace = Trace(
        tensors=(Tensor(100, freed=4), Tensor(50, freed=3)),
        accesses=tuple(Access("write" if at < 2 else "read", record, 1.0) for at, record in enumerate((0, 1, 1, 0))),
        link=Link("the link of the trace", 1e3, 1e3).to_dict(),
    )
    trace.save(tmp_path / "trace.json")
    return tmp_path


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Picture]:
    """What was to be drawn."""
    found: list[Picture] = []
    monkeypatch.setattr(pictures, "to_png", lambda picture: found.append(picture) or b"a picture")
    return found


def test_the_picture_and_the_page_are_written(out: Path) -> None:
    managed = report(500 * MB, timeline={"spans": [SPAN], "held": [(0.0, 0), (0.5, 100)]})
    pictures.write_figures(out, report(900 * MB), managed, budget=50, cap=800 * MB)
    assert (out / "memory.png").read_bytes().startswith(b"\x89PNG")
    page = (out / "report.html").read_text()
    assert "A 3D U-Net on a whole brain" in page
    assert "<svg" in page


def test_both_runs_are_drawn_with_the_most_that_the_last_step_held_and_the_cap(out: Path, drawn: list[Picture]) -> None:
    pictures.write_figures(out, report(900 * MB), report(600 * MB), budget=50, cap=800 * MB)
    (picture,) = drawn
    plain, managed = picture.curves
    assert (plain.label, plain.peak, plain.end) == ("plain", 900 * MB, 2.0)
    assert plain.points == ((0.0, 300 * MB), (1.0, 700 * MB), (2.0, 400 * MB))
    assert (managed.label, managed.peak) == ("with LMS", 700 * MB), "a sample may see more than the step's own count"
    assert (picture.limit, picture.limit_label) == (800 * MB, "hard cap of the proof")
    assert (out / "memory.png").read_bytes() == b"a picture"


def test_transfers_are_drawn_where_their_times_were_taken(out: Path, drawn: list[Picture]) -> None:
    for timeline in ({"spans": [SPAN], "held": [(0.0, 0)]}, None):
        pictures.write_figures(out, report(1), report(1, timeline=timeline), budget=50, cap=1)
    assert [picture.spans for picture in drawn] == [(Span("out", 0.5, 0.75, 100, 0),), ()]


@pytest.mark.parametrize(("device", "words"), [("cpu", "by the process"), ("cuda", "of the GPU")])
def test_the_axis_says_whose_memory_it_is(device: str, words: str, out: Path, drawn: list[Picture]) -> None:
    pictures.write_figures(out, report(1, device), report(1, device), budget=50, cap=1)
    assert words in drawn[0].memory_label


def test_the_page_plans_for_the_budget_on_the_link_of_the_trace(
    out: Path, drawn: list[Picture], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(pictures, "render", lambda trace, **more: asked.update(more) or "a page")
    ran = {"spans": [SPAN], "held": [(0.0, 0), (0.5, 100)]}
    managed = report(1, timeline=ran, lms={"saved": 150.0})
    pictures.write_figures(out, report(1), managed, budget=50, cap=1)
    assert asked["link"].name == "the link of the trace"
    assert asked["plan"].budget == 50
    assert asked["plan"].moved() == {0}
    assert asked["stats"] == {"saved": 150.0}
    assert asked["ran"].held == ((0.0, 0), (0.5, 100))
    assert (out / "report.html").read_text() == "a page"


def test_a_trace_without_a_link_is_an_error(out: Path, drawn: list[Picture]) -> None:
    Trace((), ()).save(out / "trace.json")
    with pytest.raises(UsageError, match="no link"):
        pictures.write_figures(out, report(1), report(1), budget=50, cap=1)
