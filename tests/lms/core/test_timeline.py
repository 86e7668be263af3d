"""Spans and timelines are plain data."""

from dataclasses import asdict

import pytest

from lms.core.timeline import Span, Timeline


def test_a_span_of_computation_has_neither_bytes_nor_a_record() -> None:
    assert (Span("compute", 0.0, 1.0).nbytes, Span("compute", 0.0, 1.0).record) == (0, -1)


def test_a_timeline_is_a_value() -> None:
    one, other = (Timeline((Span("out", 0.0, 1.0, 5, 2),), ((0.0, 0), (1.0, 5))) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    with pytest.raises(AttributeError):
        one.spans[0].end = 2.0  # type: ignore[misc]


def test_as_plain_data_each_field_of_a_span_has_its_name() -> None:
    """Reports of a training are written so, and read by others."""
    plain = asdict(Timeline((Span("out", 1.0, 2.0, 8, 3),), ((0.0, 8),)))
    assert plain["spans"] == ({"lane": "out", "start": 1.0, "end": 2.0, "nbytes": 8, "record": 3},)
