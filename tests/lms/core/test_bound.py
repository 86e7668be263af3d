"""No schedule is faster than the bound: not the planner's, and none of all that there are for a tiny pass."""

import itertools
import random
import statistics
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lms.core.bound import Bound, least_seconds
from lms.core.gaps import find_gaps, held_at
from lms.core.plan import floor, make_plan, plain_peak
from lms.core.schedule import Schedule, Swap
from lms.core.simulate import Forecast, simulate
from lms.errors import UsageError
from lms.link import Link
from lms.trace import Trace

SOME = settings(max_examples=20, deadline=None)
ONE = Link("one byte a second", 1.0, 1.0, 0.0)


@SOME
@given(st.data())
def test_no_plan_under_a_budget_is_faster(traces: ModuleType, data: st.DataObject) -> None:
    trace, link = data.draw(traces.passes()), data.draw(traces.LINKS)
    budget = data.draw(st.integers(0, trace.saved))
    plan = make_plan(trace, link, budget=budget)
    bound = least_seconds(trace, link, budget=budget)
    assert trace.seconds <= bound.seconds <= plan.forecast.seconds + 1e-9


@SOME
@given(st.data())
def test_no_plan_under_a_limit_is_faster(traces: ModuleType, data: st.DataObject) -> None:
    trace, link = data.draw(traces.passes(measured=True)), data.draw(traces.LINKS)
    limit = data.draw(st.integers(floor(trace)[0], plain_peak(trace)))
    plan = make_plan(trace, link, limit=limit)
    bound = least_seconds(trace, link, limit=limit)
    assert trace.seconds <= bound.seconds <= plan.forecast.seconds + 1e-9


def within(forecast: Forecast, cap: tuple[int, ...]) -> bool:
    """Whether no more than the cap is held once each access is done with, when the next computation begins."""
    begins = [span.start for span in forecast.spans if span.lane == "compute"]
    held = [max(step for step in enumerate(forecast.held) if step[1][0] <= begin)[1][1] for begin in begins[1:]]
    assert len(held) == len(cap)
    return all(have <= most for have, most in zip(held, cap, strict=True))


def everything(traces: ModuleType, rng: random.Random) -> tuple[float, Bound, float]:
    """The fastest of all schedules of a chain of three records, the bound, and the plan's time.

    A record stays, or it leaves with any access and may start back with any later one, in any order.
    """
    sizes = [rng.randint(1, 20) for _ in range(3)]
    trace = traces.chain(sizes, [rng.choice([0.5, 1.0, 2.0]) for _ in sizes])
    # Each stretch of computation takes time, so that `within` can tell it from the next.
    trace = trace.with_measured([seconds or 0.25 for seconds in trace.times], trace.others)
    link = Link("random", rng.choice([4.0, 8.0, 16.0]), rng.choice([4.0, 8.0, 16.0]), rng.choice([0.0, 0.25]))
    budget = rng.randint(0, trace.saved // 2)
    plan = make_plan(trace, link, budget=budget)
    ways: list[list[Swap | None]] = [
        [None]
        + [
            Swap(record, after, before, reload, True)
            for after in range(written, before)
            for reload in range(after, before + 1)
        ]
        for record, (written, before) in enumerate(trace.touches)
    ]
    fastest = plan.forecast.seconds
    # What an operation has in hand may be above the cap, as in the plan.
    cap = tuple(np.maximum(plan.cap, held_at(trace, find_gaps(trace))).tolist())
    for way in itertools.product(*ways):
        moves = tuple(sorted((move for move in way if move is not None), key=lambda move: move.after))
        forecast = simulate(trace, Schedule(moves, cap), link)
        if forecast.seconds < fastest and within(forecast, cap):
            fastest = forecast.seconds
    return fastest, least_seconds(trace, link, budget=budget), plan.forecast.seconds


def test_it_is_close_to_the_fastest_of_all_schedules_of_a_tiny_chain(traces: ModuleType) -> None:
    seed = 24
    print(f"seed {seed}")
    rng = random.Random(seed)
    ratios, slower = [], 0
    for _ in range(20):
        fastest, bound, planned = everything(traces, rng)
        assert bound.solved
        assert bound.seconds <= fastest + 1e-9
        ratios.append(fastest / bound.seconds)
        slower += fastest > bound.seconds * 1.001 or planned > bound.seconds * 1.001
    assert statistics.median(ratios) == pytest.approx(1.0, abs=1e-4)
    assert max(ratios) < 1.2
    assert slower  # else the bound was never put to the test


def test_by_hand_a_record_that_must_be_away_at_once_is_waited_for_twice(traces: ModuleType) -> None:
    # 4 bytes out before the second record is saved, which computes for 1 s of that, and back when it is gone.
    trace = traces.chain([4, 4], [1.0, 1.0])
    bound = least_seconds(trace, ONE, budget=0)
    assert bound.seconds == pytest.approx(trace.seconds + 3 + 4, rel=1e-5)
    assert bound.solved
    assert bound.gap(bound.seconds * 1.25) == pytest.approx(0.25)


def test_what_fits_takes_its_computation_alone(traces: ModuleType) -> None:
    trace = traces.chain([4, 4], [1.0, 1.0])
    assert least_seconds(trace, ONE, budget=8) == Bound(trace.seconds, solved=True)
    assert least_seconds(Trace((), ()), ONE, budget=0) == Bound(0.0, solved=True)


def test_nothing_is_to_be_away_earlier_than_it_can_be(traces: ModuleType) -> None:
    # The framework holds records 0 to 2 for as long as there is too much, so the plan moves nothing.
    tape = traces.Tape([10, 10, 10, 1], let_go={0: 5, 1: 4, 2: 5}, freed={0: 8, 1: 4, 2: 5}, pinned={3})
    for kind, record in zip(
        ("write", "write", "write", "read", "read", "write", "read", "read"), (0, 1, 2, 1, 2, 3, 3, 0), strict=True
    ):
        tape.access(kind, record, 1.0)
    trace = tape.trace()
    assert make_plan(trace, ONE, budget=10).forecast.seconds == trace.seconds
    assert least_seconds(trace, ONE, budget=10) == Bound(trace.seconds, solved=True)


def test_a_pass_in_which_nothing_can_leave_needs_no_solver(traces: ModuleType) -> None:
    tape = traces.Tape([4, 4], pinned={0, 1})
    for kind, record in (("write", 0), ("write", 1), ("read", 1), ("read", 0)):
        tape.access(kind, record, 1.0)
    assert least_seconds(tape.trace(), ONE, budget=0) == Bound(4.0, solved=True)


def test_a_solver_without_time_still_gives_a_bound(traces: ModuleType) -> None:
    trace = traces.gpt()
    link = Link("slow", trace.saved / trace.seconds, trace.saved / trace.seconds)
    bound = least_seconds(trace, link, budget=trace.saved // 4, effort=0.0)
    assert not bound.solved
    assert bound.why == "the solver was stopped after 0 s"
    assert trace.seconds <= bound.seconds <= make_plan(trace, link, budget=trace.saved // 4).forecast.seconds


def test_a_pass_that_is_too_long_is_refused_before_it_takes_the_memory(traces: ModuleType) -> None:
    with pytest.raises(UsageError, match=r"at 999,999 accesses together; expected 250,000 at most"):
        least_seconds(traces.chain([4] * 1000, [1.0] * 1000), ONE, budget=8)


def test_steps_with_state_and_wrong_bounds_are_refused(traces: ModuleType) -> None:
    tape = traces.Tape([4], state={0})
    tape.access("write", 0, 1.0)
    with pytest.raises(UsageError, match="lives on in the next step"):
        least_seconds(tape.trace(), ONE, budget=0)
    with pytest.raises(UsageError, match="exactly one"):
        least_seconds(traces.chain([4], [1.0]), ONE)
