"""What copies of several sizes say of a link."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from lms import documents
from lms.link.series import Series, point

MB = 1 << 20


def test_a_point_keeps_median_and_quartiles() -> None:
    one = point(100, [5.0, 1.0, 2.0, 3.0, 4.0])
    assert (one.seconds, one.low, one.high, one.count) == (3.0, 2.0, 4.0, 5)
    assert one.rate == pytest.approx(100 / 3)


def test_one_copy_has_no_spread() -> None:
    assert (point(8, [2.0]).low, point(8, [2.0]).high) == (2.0, 2.0)


def test_the_rate_is_that_of_the_large_copies_together() -> None:
    points = [point(4096, [0.1]), point(64 * MB, [0.04]), point(1024 * MB, [1.0])]
    series = Series.of("out", "O_DIRECT", points)
    assert series.rate == pytest.approx(1088 * MB / 1.04)


def test_what_a_cache_may_have_answered_does_not_count_for_the_rate() -> None:
    points = [point(4096, [1e-7]), point(16 * MB, [0.001]), point(256 * MB, [0.02])]
    assert Series.of("copy", "x", points, least=64 * MB).rate == pytest.approx(256 * MB / 0.02)


def test_the_latency_is_what_the_smallest_copy_took_beyond_its_bytes() -> None:
    series = Series.of("out", "x", [point(1000, [0.011]), point(10**6, [1.0])])
    assert series.rate == 10**6
    assert series.latency == pytest.approx(0.010)


def test_the_latency_is_never_below_nothing() -> None:
    assert Series.of("out", "x", [point(4096, [1e-9]), point(MB, [1e-3])]).latency == 0.0


def test_the_spread_is_half_the_quartiles_distance_over_the_median() -> None:
    series = Series.of("out", "x", [point(MB, [0.9, 0.95, 1.0, 1.05, 1.1])])
    assert series.spread == pytest.approx(0.05)


def test_a_series_survives_json() -> None:
    series = Series.of("both", "pinned", [point(4096, [1e-5, 2e-5]), point(MB, [1e-3])])
    assert documents.read(Series, json.loads(json.dumps(asdict(series)))) == series


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rate": 0.0}, "rate: expected a number .*found 0.0"),
        ({"rate": "fast"}, "rate: expected a number .*found 'fast'"),
        ({"rate": float("nan")}, "rate: expected a number .*found nan"),
        ({"latency": -1.0}, "latency: expected a number .*found -1.0"),
        ({"direction": "up"}, "direction: expected one of .*found 'up'"),
    ],
)
def test_figures_that_are_none_are_refused(change: dict[str, object], words: str) -> None:
    series = replace(Series("out", "x", 1.0, 0.0), **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=words):
        documents.read(Series, asdict(series), "series")
