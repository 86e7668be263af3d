"""What the benchmark of links calls reached and missed."""

from __future__ import annotations

import pytest
from links.figures import DEFINITIONS, foreseen, inside, lines, near, ordered, overhead

GB = 1e9


@pytest.mark.parametrize(("ratio", "reached"), [(0.94, False), (0.96, True), (1.0, True), (1.04, True), (1.06, False)])
def test_near_is_within_five_percent_on_either_side(ratio: float, reached: bool) -> None:
    verdict = near("x", [ratio * GB] * 3, [GB] * 3)
    assert verdict.value == pytest.approx(ratio)
    assert verdict.reached is reached


def test_rounds_are_compared_each_with_its_own() -> None:
    # The machine was twice as fast in the second half; both contestants were.
    assert near("x", [1.0, 1.0, 2.0, 2.0], [1.0, 1.0, 2.0, 2.0]).value == 1.0
    # One round that somebody disturbed decides nothing.
    assert near("x", [1.0, 1.0, 9.0], [1.0, 1.0, 1.0]).reached


def test_writes_must_lie_between_fios_slowest_and_fastest() -> None:
    assert inside("x", [1.5] * 3, [1.0, 2.0]).reached
    assert not inside("x", [2.1] * 3, [1.0, 2.0]).reached
    assert not inside("x", [0.9] * 3, [1.0, 2.0]).reached


def test_a_step_is_foreseen_within_fifteen_percent_round_by_round() -> None:
    assert foreseen("x", [1.14, 2.28, 1.14], [1.0, 2.0, 1.0]).reached
    assert not foreseen("x", [1.16, 2.32, 1.16], [1.0, 2.0, 1.0]).reached
    assert not foreseen("x", [0.84], [1.0]).reached


def test_the_order_is_right_when_every_pair_agrees() -> None:
    measured = {"a": [3.0], "b": [2.0], "c": [1.0]}
    assert ordered({"a": [30.0], "b": [20.0], "c": [10.0]}, measured).reached
    verdict = ordered({"a": [30.0], "b": [10.0], "c": [20.0]}, measured)
    assert not verdict.reached
    assert verdict.value == pytest.approx(2 / 3)


def test_disks_that_are_foretold_alike_have_no_order() -> None:
    assert ordered({"a": [10.0], "b": [10.1]}, {"a": [1.05], "b": [1.0]}).reached
    assert not ordered({"a": [10.0], "b": [10.3]}, {"a": [1.05], "b": [1.0]}).reached


def test_sampling_may_take_a_hundredth_of_a_core() -> None:
    assert overhead(0.009).reached
    assert not overhead(0.011).reached


def test_what_was_missed_is_printed_with_its_target() -> None:
    (line,) = lines([near("reads", [0.5 * GB], [GB])])
    assert line.startswith("MISSED  reads  0.5, must be 0.95 to 1.05")


def test_every_figure_is_defined() -> None:
    assert {"file", "read", "write", "memory", "step", "order", "overhead", "turns", "same"} == DEFINITIONS.keys()
