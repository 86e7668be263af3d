"""Counters of a session."""

import json
from dataclasses import asdict

import pytest

from lms.stats import Stats, format_seconds

KEYS = [
    *("steps", "passes", "limit", "budget", "floor", "peak", "saved", "recorded"),
    *("kept_parameters", "kept_small", "kept_owned", "kept_types", "kept_device", "kept_stream", "kept_capture"),
    *("held_peak", "largest"),
    *("swapped_out", "swapped_in", "stall_out", "stall_in"),
    *("state", "state_held", "state_out", "state_in", "state_stall"),
    *("host_peak", "file_peak", "misses", "made_room", "replans"),
    *("predicted_peak", "predicted_step_time", "step_time", "step_busy", "elapsed", "hook_time"),
    *("last_out", "last_in", "last_stall_out", "last_stall_in", "last_seconds"),
]


def test_the_dict_has_the_documented_keys_and_plain_values() -> None:
    stats = asdict(Stats(steps=3, limit=10**9))
    assert list(stats) == KEYS
    assert json.loads(json.dumps(stats)) == stats
    assert stats["steps"] == 3


def test_what_was_not_measured_is_none_and_what_was_not_counted_is_zero() -> None:
    stats = asdict(Stats())
    assert stats["peak"] is None
    assert stats["predicted_step_time"] is None
    assert stats["swapped_out"] == 0


def test_the_line_says_what_was_swapped_and_what_was_waited_for() -> None:
    line = Stats(
        steps=10, passes=11, limit=4 * 10**9, peak=3_900_000_000, saved=2 * 10**9, held_peak=10**9,
        swapped_out=11 * 10**9, swapped_in=10 * 10**9, stall_out=0.25, stall_in=0.5,
    ).line()  # fmt: skip
    assert "\n" not in line
    for part in ("10 steps", "11 passes", "3.9 GB of 4 GB", "1 GB of 2 GB", "11 GB out", "10 GB back", "750 ms"):
        assert part in line


def test_the_line_says_when_nothing_had_to_be_swapped() -> None:
    assert "nothing had to be swapped" in Stats(steps=1, passes=1).line()
    assert Stats(steps=1, passes=1).line().startswith("1 step, 1 pass, ")


def test_the_line_names_what_cannot_be_swapped_where_it_is_much() -> None:
    much = Stats(recorded=10**9, kept_types=3 * 10**8, kept_small=10**6, kept_parameters=10**10).line()
    assert "cannot be swapped (in all 300 MB of tensors that are more than plain bytes)" in much
    for little in (Stats(recorded=10**9, kept_types=10**8), Stats(recorded=10**9, kept_parameters=10**10), Stats()):
        assert "cannot be swapped" not in little.line()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 us"),
        (83e-6, "83 us"),
        (0.0124, "12.4 ms"),
        (0.99949, "999 ms"),
        (0.9996, "1 s"),
        (3.214, "3.21 s"),
        (99.94, "99.9 s"),
        (245.0, "4 min 05 s"),
    ],
)
def test_a_time_is_shown_in_the_unit_that_suits_it(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
