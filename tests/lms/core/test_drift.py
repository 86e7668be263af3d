"""When a plan's assumptions no longer hold: what is told, after how many passes, and how seldom."""

import math
from dataclasses import replace
from types import ModuleType

import pytest

from lms.core.drift import FACTOR, IN_A_ROW, LASTS, REST, Drift
from lms.core.plan import Plan, make_plan
from lms.link import Link
from lms.trace import Trace

LINK = Link("fake", 100.0, 50.0, 0.0)
Planned = tuple[Trace, Plan]


@pytest.fixture
def planned(traces: ModuleType) -> Planned:
    """A pass with 1 s of forward and 2 s of backward for each of its three records, and a plan that moves some."""
    tape = traces.chain([10, 10, 10], [1.0, 1.0, 1.0])
    trace = Trace(tape.tensors, tape.accesses, tail=tape.tail, link=LINK.to_dict())
    plan = make_plan(trace, LINK, budget=0)
    assert plan.moves
    return trace, plan


def told(
    drift: Drift, planned: Planned, *, times: int, slower: float = 1.0, link: Link = LINK, at: int = 100
) -> list[str]:
    trace, plan = planned
    gaps = [slower * seconds for seconds in trace.times]
    return [drift.note(at, trace, plan, link, gaps, usual=trace.seconds) for _ in range(times)]


def test_passes_that_compute_twice_as_long_are_a_drift_once_enough_of_them_agree(planned: Planned) -> None:
    *before, last = told(Drift(), planned, times=IN_A_ROW, slower=2.0)
    assert not any(before)
    assert last == "computation takes 2.00 x as long (18 s a pass, 9 s as planned)"


def test_a_link_at_half_its_speed_is_a_drift_of_the_direction_that_is_slower(planned: Planned) -> None:
    half = Link("fake", LINK.out, LINK.back / 2, 0.0)
    assert told(Drift(), planned, times=IN_A_ROW, link=half)[-1] == (
        "copies back take 2.00 x as long (25 B/s, 50 B/s as planned)"
    )


def test_what_becomes_faster_is_a_drift_too(planned: Planned) -> None:
    assert told(Drift(), planned, times=IN_A_ROW, slower=0.5)[-1].startswith("computation takes 0.50 x as long")


@pytest.mark.parametrize("slower", [1.0, 0.99 * FACTOR, 1.01 / FACTOR])
def test_less_than_the_factor_is_none(planned: Planned, slower: float) -> None:
    drift = Drift()
    assert not any(told(drift, planned, times=5 * IN_A_ROW, slower=slower))
    assert not drift.suspected


def test_short_passes_must_agree_for_longer(traces: ModuleType) -> None:
    trace = traces.chain([10] * 3, [0.01] * 3)
    planned = trace, make_plan(trace, LINK, budget=0)
    slow = 2 * trace.seconds
    *before, last = told(Drift(), planned, times=math.ceil(LASTS / slow), slower=2.0)
    assert len(before) > 5
    assert not any(before)
    assert last


def test_single_slow_passes_and_passes_that_contradict_each_other_are_none(planned: Planned) -> None:
    drift = Drift()
    for _ in range(5):
        assert not any(told(drift, planned, times=IN_A_ROW - 1, slower=3.0))
        assert drift.suspected
        assert not any(told(drift, planned, times=1, slower=1.0))
        assert not drift.suspected
    for slower in (3.0, 1 / 3.0) * 5:
        assert not any(told(drift, planned, times=1, slower=slower))


def test_a_plan_that_moves_nothing_cannot_drift(planned: Planned) -> None:
    trace, _ = planned
    nothing = trace, make_plan(trace, LINK, budget=trace.saved)
    drift = Drift()
    told(drift, planned, times=1, slower=2.0)
    assert drift.suspected
    assert not any(told(drift, nothing, times=IN_A_ROW, slower=2.0))
    assert not drift.suspected


def test_each_new_plan_rests_for_twice_as_long_as_the_one_before(planned: Planned) -> None:
    drift = Drift()
    at = 100
    for replans in range(4):
        drift.settle(at)
        rest = REST << replans
        assert not any(told(drift, planned, times=2 * IN_A_ROW, slower=2.0, at=at + rest - 1))
        assert told(drift, planned, times=IN_A_ROW, slower=2.0, at=at + rest)[-1]
        at += rest


def test_a_direction_in_which_nothing_is_copied_cannot_drift(traces: ModuleType) -> None:
    # Record 0 leaves after its read and need not come back.
    tape = traces.Tape([4, 1, 4], freed={0: 6}, pinned={1})
    for kind, record in (("write", 0), ("write", 1), ("read", 0), ("read", 1), ("write", 2), ("read", 2)):
        tape.access(kind, record, 4.0)
    trace = replace(tape.trace(base=100), link=LINK.to_dict())
    plan = make_plan(trace, LINK, limit=106)
    assert (plan.forecast.out, plan.forecast.back) == (4, 0)
    half = Link("fake", LINK.out / 2, LINK.back / 2, 0.0)
    assert told(Drift(), (trace, plan), times=IN_A_ROW, link=half)[-1] == (
        "copies out take 2.00 x as long (50 B/s, 100 B/s as planned)"
    )
