"""Advice: which figures support it, and which do not."""

from dataclasses import replace

import pytest

from lms.advice import LEAST_SECONDS, LEAST_STEPS, advice
from lms.stats import Stats

# A run about which there is nothing to say.
GOOD = Stats(
    steps=100, passes=100, limit=10 * 10**9, peak=9 * 10**9, saved=4 * 10**9, elapsed=50.0, step_time=0.5,
    predicted_step_time=0.49, swapped_out=10**11, swapped_in=10**11, stall_out=1.0, stall_in=1.0, replans=2, misses=10,
)  # fmt: skip


def rules(stats: Stats) -> list[str]:
    return [one.rule for one in advice(stats)]


def test_a_run_as_foreseen_gets_no_advice() -> None:
    assert advice(GOOD) == []


def test_much_waiting_asks_for_a_higher_limit_and_says_how_much_and_what_the_limit_is() -> None:
    (one,) = advice(replace(GOOD, stall_in=12.0))
    assert (one.rule, one.option, one.figure) == ("stalls", "limit", pytest.approx(0.26))
    for part in ("26%", "13 s of 50 s", "--limit", "now 10 GB"):
        assert part in one.text


def test_waiting_for_optimizer_state_counts_and_under_a_budget_the_budget_is_the_option() -> None:
    (one,) = advice(replace(GOOD, limit=None, budget=10**9, state_stall=10.0))
    assert one.option == "budget"
    assert "--budget, now 1 GB" in one.text


def test_a_step_far_from_its_forecast_means_a_shared_link() -> None:
    (one,) = advice(replace(GOOD, predicted_step_time=0.25))
    assert (one.rule, one.option, one.figure) == ("link", "spill_dir", pytest.approx(2.0))
    assert "500 ms, 2.0 times the 250 ms" in one.text


def test_a_slow_step_that_moved_nothing_says_nothing_of_the_link() -> None:
    assert rules(replace(GOOD, predicted_step_time=0.25, swapped_out=0, swapped_in=0)) == []


@pytest.mark.parametrize("counts", [{"replans": 10}, {"misses": 200}])
def test_many_replans_or_misses_mean_changing_shapes(counts: dict[str, int]) -> None:
    (one,) = advice(replace(GOOD, **counts))
    assert one.rule == "shapes"
    assert f"{next(iter(counts.values()))} " in one.text
    assert "100 passes" in one.text


def test_the_few_replans_of_better_measurements_say_nothing() -> None:
    assert rules(replace(GOOD, steps=30, passes=30, replans=3)) == []


def test_a_low_peak_with_nothing_swapped_has_room_for_a_larger_batch() -> None:
    (one,) = advice(replace(GOOD, peak=5 * 10**9, saved=2 * 10**9, swapped_out=0, swapped_in=0))
    assert (one.rule, one.option, one.figure) == ("room", "batch size", pytest.approx(0.5))
    for part in ("5 GB", "50% of the limit of 10 GB", "3.5 times", "2 GB are saved"):
        assert part in one.text
    assert rules(replace(GOOD, peak=5 * 10**9)) == []  # what was swapped is what keeps the peak low


def test_a_run_that_is_too_short_gets_none() -> None:
    bad = replace(GOOD, stall_in=25.0, replans=50)
    assert rules(bad) == ["stalls", "shapes"]
    assert rules(replace(bad, steps=LEAST_STEPS - 1)) == []
    assert rules(replace(bad, elapsed=LEAST_SECONDS / 2)) == []


def test_figures_that_were_not_measured_are_no_reason() -> None:
    assert rules(Stats(steps=100, passes=100, elapsed=50.0)) == []


def test_every_piece_names_a_figure_of_the_run_and_says_nothing_of_losses() -> None:
    bad = replace(GOOD, stall_in=25.0, replans=50, predicted_step_time=0.1)
    for one in advice(bad):
        assert any(letter.isdigit() for letter in one.text)
        assert "loss" not in one.text
