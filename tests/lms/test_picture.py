"""The picture of one step."""

import struct
import xml.etree.ElementTree as ET

import pytest

from lms.core.timeline import Span, Timeline
from lms.core.trace import Access, Tensor
from lms.drawing import svg
from lms.picture import DETAIL, LANES, Curve, Picture, draw, managed_curve, plain_curve, to_png
from lms.trace import Trace

pytest.importorskip("matplotlib")


def two_records(other: int = 0) -> Trace:
    """Saved one after the other, used in the opposite order; one second before each access and in the tail."""
    return Trace(
        tensors=(Tensor(100, freed=4), Tensor(50, freed=3)),
        accesses=tuple(
            Access("write" if at < 2 else "read", record, 1.0, other=other * (at + 1))
            for at, record in enumerate((0, 1, 1, 0))
        ),
        tail=1.0,
        tail_other=other * 5,
    )


def test_plain_memory_rises_with_saves_and_falls_where_records_are_freed() -> None:
    curve = plain_curve(two_records(), whole=False)
    assert curve.points == ((0.0, 0), (1.0, 100), (2.0, 150), (4.0, 100))
    assert (curve.end, curve.peak) == (5.0, 150)


def test_the_whole_device_is_what_was_saved_and_what_else_was_measured_in_the_same_stretch() -> None:
    curve = plain_curve(two_records(other=1000), whole=True)
    assert curve.points == ((0.0, 1000), (1.0, 2100), (2.0, 3150), (3.0, 4150), (4.0, 5100))


def test_a_trace_counts_as_measured_only_when_every_stretch_is() -> None:
    assert two_records(other=1).measured
    assert not two_records().measured
    assert not Trace((), ()).measured


@pytest.mark.parametrize("offset", [0.0, 0.5], ids=["without stalls", "with a stall"])
def test_managed_memory_adds_the_rest_of_each_stretch_to_what_was_held(offset: float) -> None:
    stall = [Span("stall", 2.0, 2.0 + offset)] if offset else []
    starts = [0.0, 1.0, 2.0 + offset, 3.0 + offset, 4.0 + offset]
    ran = Timeline(
        tuple([Span("compute", start, start + 1) for start in starts] + stall), ((0.0, 0), (1.0, 100), (1.5, 0))
    )
    curve = managed_curve(two_records(other=1000), ran, whole=True)
    assert curve.points == (
        (0.0, 1000), (1.0, 2100), (1.5, 2000), (2.0 + offset, 3000), (3.0 + offset, 4000), (4.0 + offset, 5000)
    )  # fmt: skip
    assert curve.end == 5.0 + offset


def test_the_saved_bytes_alone_are_what_was_held() -> None:
    ran = Timeline((Span("compute", 0.0, 3.0),), ((0.0, 0), (1.0, 100), (1.0, 70), (1.5, 0)))
    curve = managed_curve(two_records(), ran, whole=False)
    assert curve.points == ((0.0, 0), (1.0, 70), (1.5, 0))
    assert curve.peak == 100  # a peak counts, however short


def stairs(count: int) -> Picture:
    """A picture with `count` steps and spans, and one peak that is as high as no other."""
    points = tuple((at / count, 10**9 if at == count // 3 else at % 7 * 10**6) for at in range(count))
    lanes = [lane for lane, _, _ in LANES]
    spans = tuple(Span(lanes[at % 4], at / count, (at + 0.5) / count, 1, at) for at in range(count))
    return Picture("title", (Curve("plain", points, 1.0, 10**9),), spans, limit=5 * 10**8, floor=10**8)


def test_a_picture_of_many_steps_stays_small_and_keeps_its_peak() -> None:
    figure = draw(stairs(10 * DETAIL))
    assert len(svg(figure)) < 3 * len(svg(draw(stairs(DETAIL // 2))))
    (drawn,) = [line for line in figure.axes[0].get_lines() if line.get_label().startswith("plain")]
    assert max(drawn.get_ydata()) == 1.0  # GB


def test_the_legend_names_curves_limit_and_floor_with_their_sizes() -> None:
    legend = draw(stairs(10)).axes[0].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["plain: peak 1 GB", "limit: 500 MB", "floor: 100 MB"]


def test_there_is_a_lane_for_each_kind_of_work_and_none_without_any() -> None:
    with_lanes = draw(stairs(10))
    assert [label.get_text() for label in with_lanes.axes[1].get_yticklabels()] == [name for _, name, _ in LANES]
    assert len(draw(Picture("title", stairs(10).curves)).axes) == 1


def test_lanes_are_told_apart_by_more_than_colour() -> None:
    hatches = {collection.get_hatch() for collection in draw(stairs(10)).axes[1].collections}
    assert len(hatches) > 1
    assert len({colour for _, _, colour in LANES}) == len(LANES)


def test_waiting_too_short_to_see_is_not_drawn() -> None:
    def waits(seconds: float) -> bool:
        spans = (Span("compute", 0.0, 1.0), Span("stall", 0.5, 0.5 + seconds))
        lanes = draw(Picture("title", stairs(10).curves, spans)).axes[1]
        return len(lanes.collections) == 2

    assert waits(0.01)
    assert not waits(1e-5)


def test_svg_is_one_element_with_text_that_can_be_searched_and_always_the_same() -> None:
    page = svg(draw(stairs(10)))
    assert ET.fromstring(page).tag.endswith("svg")
    assert "copies out" in page
    assert page == svg(draw(stairs(10)))


def test_png_is_a_png_wide_enough_to_print() -> None:
    png = to_png(stairs(10))
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">I", png[16:20])[0] >= 1200


def test_an_empty_picture_can_be_drawn() -> None:
    picture = Picture("nothing", (plain_curve(Trace((), ()), whole=False),))
    assert to_png(picture).startswith(b"\x89PNG")
