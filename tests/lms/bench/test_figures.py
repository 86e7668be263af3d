"""Ratios, spreads and verdicts, on cells that were made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import figures
import pytest
from figures import Cell, Step, Verdict

MB = 10**6
SESSION = {
    "saved": 100 * MB,
    "largest": 10 * MB,
    "held_peak": 40 * MB,
    "pass_held_peak": 40 * MB,
    "last_out": 65 * MB,
    "last_in": 65 * MB,
    "swapped_out": 200 * MB,
    "swapped_in": 200 * MB,
    "hook_time": 0.0,
    "again": 0.0,
    "held_at_floor": 0.0,
    "last_stall_out": 0.1,
    "last_stall_in": 0.1,
    "busy_out": 0.5,
    "busy_in": 0.5,
    "link_out": 1e9,
    "link_back": 1e9,
}
FORECAST = {
    "seconds": 1.0,
    "held_peak": 40 * MB,
    "busy_out": 0.5,
    "busy_in": 0.5,
    "stall_out": 0.1,
    "stall_in": 0.1,
    "out": 65 * MB,
    "back": 65 * MB,
}


def step(seconds: float = 1.0, **session: float) -> Step:
    return Step(seconds, 2 * seconds, "0x1p0", "abc", 500 * MB, session={**SESSION, **session}, forecast=FORECAST)


def cell(name: str = "lms-35%", *seconds: float, share: float | None = 0.35, **session: float) -> Cell:
    budget = None if share is None else int(share * SESSION["saved"])
    return Cell(name, "lms", share, budget, warm=1, steps=[step(9.0), *(step(s, **session) for s in seconds or (1.0,))])


def plain(*seconds: float) -> Cell:
    steps = [Step(s, 2 * s, "0x1p0", "abc", 900 * MB) for s in (9.0, *(seconds or (1.0,)))]
    return Cell("plain", "plain", warm=1, steps=steps)


def only(verdicts: list[Verdict], figure: str) -> Verdict:
    found = [verdict for verdict in verdicts if verdict.figure == figure]
    assert len(found) == 1
    return found[0]


def test_ratios_are_paired_within_a_round_and_leave_the_warm_up_out() -> None:
    assert figures.paired(cell("x", 2.0, 3.0), plain(1.0, 2.0)) == [2.0, 1.5]


def test_a_cell_that_ended_early_is_paired_for_the_rounds_that_it_ran() -> None:
    assert figures.paired(cell("x", 2.0), plain(1.0, 2.0, 4.0)) == [2.0]


def test_the_spread_has_median_quartiles_and_range() -> None:
    found = figures.spread([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (found.median, found.low, found.high, found.least, found.most, found.count) == (3, 2, 4, 1, 5, 5)


def test_the_spread_of_one_value_is_that_value() -> None:
    assert figures.spread([2.0]) == figures.Spread(2, 2, 2, 2, 2, 1)


def test_the_spread_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        figures.spread([])


def test_the_noise_floor_is_the_farther_quartile_s_distance_from_one() -> None:
    assert figures.noise_floor([0.90, 0.95, 1.00, 1.02, 1.10]) == pytest.approx(0.05)
    assert figures.noise_floor([1.0, 1.0, 1.0]) == 0


def test_one_different_bit_in_any_step_is_found_and_named() -> None:
    other = cell("x", 1.0, 1.0)
    other.steps[2] = replace(other.steps[2], digest="abd")
    verdict = figures.identical(other, plain(1.0, 1.0))
    assert not verdict.reached
    assert "step 2" in verdict.note
    other.steps[2] = replace(other.steps[2], digest="abc", loss="0x1.8p0")
    assert not figures.identical(other, plain(1.0, 1.0)).reached


def test_the_warm_up_is_compared_too() -> None:
    other = cell("x", 1.0)
    other.steps[0] = replace(other.steps[0], digest="abd")
    assert figures.differing_steps(other, plain(1.0)) == [0]


def test_equal_bits_are_identical() -> None:
    assert figures.identical(cell("x", 1.0), plain(1.0)).reached


@pytest.mark.parametrize(("held", "reached"), [(45 * MB, True), (45 * MB + 1, False)])
def test_the_managed_peak_may_pass_the_budget_by_the_largest_record(held: int, reached: bool) -> None:
    verdict = only(figures.memory(cell(held_peak=held), None), "managed peak")
    assert (verdict.value, verdict.target, verdict.reached) == (held, 45 * MB, reached)


def test_the_managed_peak_counts_the_warm_up() -> None:
    over = cell()
    over.steps[0] = step(held_peak=46 * MB)
    assert not only(figures.memory(over, None), "managed peak").reached


@pytest.mark.parametrize(("floor", "reached"), [(455 * MB, True), (455 * MB - 1, False)])
def test_the_resident_peak_is_held_against_floor_budget_and_the_largest_record(floor: int, reached: bool) -> None:
    assert only(figures.memory(cell(), floor), "resident peak").reached is reached


def test_without_a_floor_the_resident_peak_is_not_judged() -> None:
    verdict = only(figures.memory(cell(), None), "resident peak")
    assert verdict.reached is None
    assert "share 0" in verdict.note


def test_what_the_memory_bound_makes_come_twice_is_told_beside_the_bytes_back() -> None:
    told = {verdict.figure: verdict.note for verdict in figures.memory(cell(again=7e6), None)}
    assert told["bytes back"] == "the bound on held bytes makes 7 MB come back twice"
    assert not any(verdict.note for verdict in figures.memory(cell(), 0))


@pytest.mark.parametrize(("key", "figure"), [("last_out", "bytes out"), ("last_in", "bytes back")])
def test_bytes_moved_are_held_against_what_may_not_stay(key: str, figure: str) -> None:
    assert only(figures.memory(cell(**{key: 75 * MB}), None), figure).reached
    assert not only(figures.memory(cell(**{key: 75 * MB + 1}), None), figure).reached


def test_a_step_within_ten_percent_beyond_the_noise_is_reached() -> None:
    assert figures.step_time(cell("x", 1.14), plain(1.0), noise=0.05).reached


def test_a_slow_step_is_missed_where_the_disk_could_have_hidden_the_bytes() -> None:
    verdict = figures.step_time(cell("x", 1.2), plain(1.0), noise=0.05)
    assert not verdict.reached
    assert verdict.target == pytest.approx(1.15)
    assert "could hide" in verdict.note


def test_a_slow_disk_moves_the_target_to_the_time_that_the_bytes_take() -> None:
    # 65 MB each way at 65 MB/s out and 65 MB/s back: 2 s, where plain takes 1.
    slow = {"link_out": 65e6, "link_back": 65e6}
    verdict = figures.step_time(cell("x", 2.3, **slow), plain(1.0), noise=0.0)
    assert verdict.target == pytest.approx(1.15 * 2)
    assert verdict.reached
    assert not figures.step_time(cell("x", 2.31, **slow), plain(1.0), noise=0.0).reached


def test_the_disk_bound_is_never_below_the_computation() -> None:
    assert figures.disk_bound(3.0, 1e9, 1e9, 1e9) == 3.0
    assert figures.disk_bound(1.0, 1e9, 1e9, 0.5e9) == 3.0


@pytest.mark.parametrize(("seconds", "reached"), [(1.0, True), (1.04, True), (1.06, False)])
def test_the_other_checkouts_cell_is_held_against_ours_alone(seconds: float, reached: bool) -> None:
    other = replace(cell("lms-35% older", 1.0, held_peak=99 * MB), other=True)
    cells = {"plain": plain(1.0), "plain-again": plain(1.05), "lms-35%": cell("lms-35%", seconds), other.name: other}
    verdicts = figures.judge(cells)
    verdict = only(verdicts, "over the other")
    assert (verdict.cell, verdict.value, verdict.reached) == ("lms-35%", seconds, reached)
    assert {verdict.figure for verdict in verdicts if verdict.cell == other.name} == {"identical"}


@pytest.mark.parametrize(("seconds", "reached"), [(1.5, True), (1.49, False)])
def test_swap_must_be_half_as_slow_again(seconds: float, reached: bool) -> None:
    swap = plain(seconds)
    assert figures.against_swap(swap, cell("lms-capped", 1.0)).reached is reached


def test_swap_that_did_not_run_is_not_judged_and_says_why() -> None:
    swap = Cell("swap", "plain", note="not run: takes root")
    verdict = figures.against_swap(swap, cell("lms-capped", 1.0))
    assert (verdict.value, verdict.reached, verdict.note) == (None, None, "not run: takes root")


def test_with_everything_fitting_nothing_may_move_and_hooks_are_a_part_of_the_cpu_time() -> None:
    fits = cell("lms-fits", share=None)
    # Warm-up hooks do not count: 5 s there, then 0.03 and 0.05 of each step's 2 s.
    fits.steps = [step(1.0, hook_time=t, swapped_out=0.0, swapped_in=0.0) for t in (5.0, 5.03, 5.08)]
    moved, hooks = figures.fitting(fits)
    assert moved.reached
    assert hooks.value == pytest.approx(0.02)
    fits.steps[-1] = step(1.0, hook_time=5.09, swapped_out=1.0, swapped_in=0.0)
    moved, hooks = figures.fitting(fits)
    assert not moved.reached
    assert not hooks.reached


def test_the_simulator_is_exact_to_one_record() -> None:
    assert only(figures.forecasts({"x": cell(pass_held_peak=50 * MB)}), "predicted peak").reached
    missed = only(figures.forecasts({"x": cell(pass_held_peak=51 * MB)}), "predicted peak")
    assert not missed.reached
    assert missed.value == -11 * MB


def test_the_simulator_s_times_are_judged_by_the_median_over_the_cells() -> None:
    cells = {"a": cell(busy_out=0.5), "b": cell(busy_out=0.6), "c": cell(busy_out=3.5)}
    verdict = only(figures.forecasts(cells), "predicted transfers")
    assert verdict.value == pytest.approx(0.1 / 1.1)
    assert verdict.reached
    assert only(figures.forecasts(cells), "predicted stalls").value == 0


def test_a_stall_that_was_measured_and_not_foretold_counts() -> None:
    verdict = only(figures.forecasts({"x": cell(last_stall_in=0.9)}), "predicted stalls")
    assert verdict.value == pytest.approx(0.8)
    assert not verdict.reached


def test_stalls_too_short_to_matter_are_left_out_and_counted() -> None:
    quiet = cell(last_stall_out=0.001, last_stall_in=0.0)
    quiet.steps = [replace(s, forecast={**FORECAST, "stall_out": 0.0, "stall_in": 0.0}) for s in quiet.steps]
    verdict = only(figures.forecasts({"x": quiet}), "predicted stalls")
    assert verdict.reached is None
    assert "1 more" in verdict.note


def test_a_forecast_without_anything_measured_is_infinitely_wrong() -> None:
    assert figures.error(1.0, 0.0) == float("inf")
    assert figures.error(1.5, 1.0) == 0.5


def test_the_floor_is_what_the_cell_without_a_budget_holds_beside_its_records() -> None:
    nothing = cell("lms-0%", share=0.0, held_at_floor=10 * MB)
    assert figures.floor_of([cell(), nothing]) == 490 * MB
    assert figures.floor_of([cell()]) is None


def test_a_whole_model_is_judged_and_only_the_judged_share_for_time() -> None:
    cells = {
        one.name: one
        for one in (
            plain(1.0, 1.0),
            replace(plain(1.0, 1.0), name="plain-again"),
            cell("lms-35%", 1.0, 1.0),
            cell("lms-0%", 1.0, 1.0, share=0.0),
            Cell("swap", "plain", note="not run: takes root"),
            replace(cell("lms-capped", 1.0, 1.0), cap=MB),
        )
    }
    verdicts = figures.judge(cells)
    assert only(verdicts, "step time").cell == "lms-35%"
    assert only(verdicts, "against swap").reached is None
    assert {v.cell for v in verdicts if v.figure == "identical"} == {"plain-again", "lms-35%", "lms-0%", "lms-capped"}
    assert {v.cell for v in verdicts if v.figure == "resident peak"} == {"lms-35%", "lms-0%"}


def test_every_verdict_s_figure_is_defined() -> None:
    fits = cell("lms-fits", share=None)
    verdicts = [
        *figures.memory(cell(), 1),
        *figures.fitting(fits),
        *figures.forecasts({"x": cell()}),
        figures.identical(cell(), plain()),
        figures.step_time(cell(), plain(), 0.0),
        figures.against_swap(plain(), cell()),
    ]
    assert {verdict.figure for verdict in verdicts} <= set(figures.DEFINITIONS)


def test_the_documentation_defines_every_figure_in_the_same_words() -> None:
    page = (Path(__file__).parents[3] / "docs" / "benchmarks.md").read_text()
    for name, meaning in figures.DEFINITIONS.items():
        assert f"| {name} | {meaning} |" in page, name
