"""What executing a schedule costs, by hand and against an independent count."""

import itertools
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lms.core.plan import make_plan
from lms.core.schedule import Schedule, Swap
from lms.core.simulate import Forecast, simulate
from lms.core.timeline import Lane
from lms.link import Link
from lms.trace import Trace

ONE = Link("one byte a second", 1.0, 1.0, 0.0)
ROOMY = 10**9
FEWER = settings(max_examples=50)


def stack(traces: ModuleType, sizes: list[int], seconds: float = 1.0, **tape: object) -> Trace:
    """Saved one after the other and used in the opposite order, each access after `seconds` of computation."""
    made = traces.Tape(sizes, **tape)
    for record in range(len(sizes)):
        made.access("write", record, seconds)
    for record in reversed(range(len(sizes))):
        made.access("read", record, seconds)
    trace: Trace = made.trace()
    return trace


def spans(forecast: Forecast, lane: Lane) -> list[tuple[float, float, int]]:
    return [(span.start, span.end, span.record) for span in forecast.spans if span.lane == lane]


# By hand


def test_without_moves_the_pass_takes_its_computation_and_holds_what_is_live(traces: ModuleType) -> None:
    trace = stack(traces, [3, 5, 2])
    forecast = simulate(trace, Schedule((), (ROOMY,) * 6), ONE)
    assert (forecast.seconds, forecast.held_peak) == (6.0, 10)
    assert (forecast.out, forecast.back, forecast.stall_out, forecast.stall_in, forecast.misses) == (0, 0, 0, 0, 0)
    assert forecast.held == ((0.0, 0), (1.0, 3), (2.0, 8), (3.0, 10), (5.0, 8), (6.0, 3))


def test_copies_that_computation_hides_cost_nothing(traces: ModuleType) -> None:
    trace = stack(traces, [1, 1, 1])
    forecast = simulate(trace, Schedule((Swap(0, 0, 5, 3, True),), (ROOMY,) * 6), ONE)
    assert forecast.seconds == trace.seconds
    assert spans(forecast, "out") == [(1.0, 2.0, 0)]
    assert spans(forecast, "back") == [(4.0, 5.0, 0)]
    assert forecast.held == ((0.0, 0), (1.0, 1), (2.0, 0), (2.0, 1), (3.0, 2), (4.0, 3), (5.0, 2), (6.0, 1))
    assert (forecast.out, forecast.back, forecast.busy_out, forecast.busy_in) == (1, 1, 1.0, 1.0)


def test_a_use_waits_for_its_copy_back(traces: ModuleType) -> None:
    trace = stack(traces, [3, 1])
    forecast = simulate(trace, Schedule((Swap(0, 0, 3, 2, True),), (ROOMY,) * 4), Link("", 3.0, 1.0, 0.0))
    assert spans(forecast, "back") == [(3.0, 6.0, 0)]
    assert spans(forecast, "stall") == [(4.0, 6.0, 0)]
    assert (forecast.seconds, forecast.stall_in, forecast.misses) == (6.0, 2.0, 0)


def test_computation_waits_for_the_oldest_copies_out_while_more_than_the_cap_is_held(traces: ModuleType) -> None:
    trace = stack(traces, [2, 2, 2])
    moves = (Swap(0, 0, 5, 5, True), Swap(1, 1, 4, 4, True))
    forecast = simulate(trace, Schedule(moves, (4, 4, 4, 4, 4, 4)), ONE)
    assert spans(forecast, "out") == [(1.0, 3.0, 0), (3.0, 5.0, 1)]
    assert forecast.held_peak == 4
    assert forecast.stall_out == 0.0
    tight = simulate(trace, Schedule(moves, (4, 2, 4, 4, 4, 4)), ONE)
    assert spans(tight, "stall")[0] == (2.0, 3.0, 0)
    assert tight.stall_out == 1.0


def test_each_direction_copies_one_record_at_a_time_in_order_and_each_copy_has_its_latency(traces: ModuleType) -> None:
    trace = stack(traces, [2, 1, 1, 1])
    moves = tuple(Swap(record, record, 7 - record, 5, True) for record in (0, 1))
    forecast = simulate(trace, Schedule(moves, (ROOMY,) * 8), Link("", 2.0, 4.0, 0.25))
    assert spans(forecast, "out") == [(1.0, 2.25, 0), (2.25, 3.0, 1)]
    assert spans(forecast, "back") == [(6.0, 6.5, 1), (6.5, 7.25, 0)]


def test_a_clean_record_is_dropped_at_the_next_access_without_a_copy(traces: ModuleType) -> None:
    tape = traces.Tape([2, 1])
    for kind, record in (("write", 0), ("write", 1), ("read", 0), ("read", 1), ("read", 0)):
        tape.access(kind, record, 4.0)
    moves = (Swap(0, 0, 2, 2, True), Swap(0, 2, 4, 4, False))
    forecast = simulate(tape.trace(), Schedule(moves, (ROOMY,) * 5), ONE)
    assert (forecast.out, forecast.back) == (2, 4)
    assert forecast.held == (
        (0.0, 0), (4.0, 2), (8.0, 0), (8.0, 1), (12.0, 3), (18.0, 1), (22.0, 0), (22.0, 2),
    )  # fmt: skip


def test_what_was_freed_in_the_middle_of_a_copy_is_held_until_the_copy_is_complete(traces: ModuleType) -> None:
    tape = traces.Tape([3, 1])
    tape.access("write", 0, 1.0)
    for kind in ("write", "read", "read", "read"):
        tape.access(kind, 1, 1.0)  # record 0 is freed at access 1
    forecast = simulate(tape.trace(), Schedule((Swap(0, 0, 1, 5, True),), (ROOMY,) * 5), ONE)
    assert forecast.held == ((0.0, 0), (1.0, 3), (2.0, 4), (4.0, 1))
    assert forecast.back == 0


def test_what_the_forward_still_holds_counts_as_resident_after_it_was_let_go_of(traces: ModuleType) -> None:
    tape = traces.Tape([4, 1], let_go={0: 3})
    for kind, record in (("write", 0), ("write", 1), ("hold", 1), ("hold", 1)):
        tape.access(kind, record, 4.0)
    for record in (1, 0):
        tape.access("read", record, 4.0)
    trace = tape.trace(base=100, scratch=[0, 0, 50])
    forecast = simulate(trace, Schedule((Swap(0, 0, 5, 4, True),), (ROOMY,) * 6), ONE)
    assert forecast.held_peak == 5
    # The base, the scratch ahead of access 2, the record that is in the forward's hands then, and the other one.
    assert forecast.resident_peak == 100 + 50 + 4 + 1
    known = dict(forecast.held)
    assert known[8.0] == 1  # let go of when its copy out was complete


def test_a_record_that_the_forward_still_holds_comes_back_without_a_copy(traces: ModuleType) -> None:
    trace = stack(traces, [2, 1], seconds=4.0, let_go={0: 3})
    forecast = simulate(trace, Schedule((Swap(0, 0, 3, 2, True),), (ROOMY,) * 4), ONE)
    assert (forecast.out, forecast.back, forecast.stall_in) == (2, 0, 0.0)


def test_the_resident_peak_is_unknown_when_the_rest_was_not_measured(traces: ModuleType) -> None:
    assert simulate(stack(traces, [1]), Schedule((), (ROOMY,) * 2), ONE).resident_peak == 0


def test_the_tail_belongs_to_the_pass(traces: ModuleType) -> None:
    tape = traces.Tape([1])
    tape.access("write", 0, 1.0)
    tape.access("read", 0, 1.0)
    assert simulate(tape.trace(tail=5.0), Schedule((), (ROOMY,) * 2), ONE).seconds == 7.0


# A step is a cycle


def training(traces: ModuleType, *, rewrites: bool = True, tail: float = 0.0) -> Trace:
    """One activation (10 bytes), and state (4 bytes) that the step's end reads and, perhaps, writes. 4 s an access."""
    tape = traces.Tape([10, 4], state={1})
    for kind, record in (("write", 0), ("read", 0), ("read", 1), ("write" if rewrites else "read", 1)):
        tape.access(kind, record, 4.0)
    trace: Trace = tape.trace(tail=tail)
    trace.check()
    return trace


def test_state_is_there_when_the_step_begins_and_when_it_ends(traces: ModuleType) -> None:
    forecast = simulate(training(traces), Schedule((), (ROOMY,) * 4), ONE)
    assert forecast.held == ((0.0, 0), (0.0, 4), (4.0, 14), (12.0, 4))
    assert (forecast.seconds, forecast.held_peak, forecast.out, forecast.back) == (16.0, 14, 0, 0)


def test_state_that_leaves_after_its_write_is_away_when_the_step_begins(traces: ModuleType) -> None:
    # It starts back with the activation's read, in the step after the one in which it left.
    move = Swap(1, after=3, before=6, reload=5, write=True)
    forecast = simulate(training(traces, tail=8.0), Schedule((move,), (ROOMY,) * 4), ONE)
    assert forecast.held == ((0.0, 0), (4.0, 10), (8.0, 14), (12.0, 4))
    assert (spans(forecast, "back"), spans(forecast, "out")) == ([(8.0, 12.0, 1)], [(16.0, 20.0, 1)])
    assert (forecast.seconds, forecast.misses, forecast.stall_in, forecast.stall_out) == (24.0, 0, 0.0, 0.0)


def test_state_that_comes_back_with_its_read_is_waited_for(traces: ModuleType) -> None:
    move = Swap(1, after=3, before=6, reload=6, write=True)
    forecast = simulate(training(traces), Schedule((move,), (ROOMY,) * 4), ONE)
    assert (forecast.held_peak, forecast.seconds, forecast.stall_in, forecast.misses) == (10, 20.0, 4.0, 0)


def test_state_that_only_was_read_leaves_without_a_copy(traces: ModuleType) -> None:
    move = Swap(1, after=3, before=6, reload=6, write=False)
    forecast = simulate(training(traces, rewrites=False), Schedule((move,), (ROOMY,) * 4), ONE)
    assert (forecast.out, forecast.back, forecast.held_peak) == (0, 4, 10)


def test_state_that_starts_back_before_the_step_ends_is_there_when_the_next_begins(traces: ModuleType) -> None:
    tape = traces.Tape([1, 4], state={1})
    for kind, record in (("write", 0), ("write", 1), ("read", 0), ("read", 0)):
        tape.access(kind, record, 4.0)
    forecast = simulate(tape.trace(), Schedule((Swap(1, 1, 5, 3, True),), (ROOMY,) * 4), ONE)
    assert forecast.held == ((0.0, 0), (0.0, 4), (4.0, 5), (12.0, 1), (16.0, 5))
    assert (forecast.out, forecast.back, forecast.misses, forecast.stall_in) == (4, 4, 0, 0.0)


def test_state_that_the_first_access_needs_is_away_until_then(traces: ModuleType) -> None:
    tape = traces.Tape([4, 1], state={0})
    for kind, record in (("write", 0), ("write", 1), ("read", 1)):
        tape.access(kind, record, 4.0)
    forecast = simulate(tape.trace(), Schedule((Swap(0, 0, 3, 3, True),), (ROOMY,) * 3), ONE)
    assert forecast.held == ((0.0, 0), (4.0, 4), (12.0, 0), (12.0, 1))
    assert (forecast.out, forecast.back, forecast.misses, forecast.stall_in) == (4, 4, 0, 4.0)


def test_a_tensor_that_is_written_again_comes_back_for_it_and_its_old_bytes_are_worth_nothing(
    traces: ModuleType,
) -> None:
    tape = traces.Tape([2, 1])
    for kind, record in (("write", 0), ("write", 1), ("write", 0), ("write", 1), ("read", 0)):
        tape.access(kind, record, 4.0)
    moves = (Swap(0, 0, 2, 2, True), Swap(0, 2, 4, 4, True))
    forecast = simulate(tape.trace(), Schedule(moves, (ROOMY,) * 5), ONE)
    assert (forecast.out, forecast.back, forecast.stall_in, forecast.misses) == (4, 4, 4.0, 0)
    assert forecast.held == (
        (0.0, 0), (4.0, 2), (8.0, 0), (8.0, 1), (12.0, 3), (18.0, 1), (22.0, 0), (22.0, 2),
    )  # fmt: skip


# Against an independent count


@given(st.data())
def test_the_peak_is_never_below_the_bytes_that_must_be_there(traces: ModuleType, data: st.DataObject) -> None:
    trace = data.draw(traces.passes(measured=True))
    link = data.draw(traces.LINKS)
    plan = make_plan(trace, link, budget=data.draw(st.integers(0, trace.saved)))
    needed = traces.required(trace, plan.moves)
    assert plan.forecast.held_peak >= max(needed)
    # The rest was measured for the stretch after an access, in which what leaves with that access may be gone.
    absent = [0] * len(needed)
    for move in plan.moves:
        absent[move.after] += 0 if move.stays else trace.tensors[move.tensor].nbytes
    others = [access.other for access in trace.accesses[1:]] + [trace.tail_other]
    assert plan.forecast.resident_peak >= max(map(lambda n, a, o: n - a + o, needed, absent, others))


@FEWER
@given(st.data())
def test_over_an_instant_link_the_peak_is_just_what_must_be_there(traces: ModuleType, data: st.DataObject) -> None:
    trace = data.draw(traces.passes())
    plan = make_plan(trace, traces.INSTANT, budget=data.draw(st.integers(0, trace.saved)), prefetch=0)
    assert plan.forecast.held_peak == max(traces.required(trace, plan.moves))
    assert plan.forecast.seconds == trace.seconds


@FEWER
@given(st.data())
def test_time_is_computation_and_stalls_and_never_less_than_the_link_needs(
    traces: ModuleType, data: st.DataObject
) -> None:
    trace = data.draw(traces.passes())
    link = data.draw(traces.LINKS)
    forecast = make_plan(trace, link, budget=data.draw(st.integers(0, trace.saved))).forecast
    assert forecast.seconds == pytest.approx(trace.seconds + forecast.stall_in + forecast.stall_out)
    assert forecast.seconds >= forecast.busy_in - 1e-9
    out = [span for span in forecast.spans if span.lane == "out"]
    back = [span for span in forecast.spans if span.lane == "back"]
    assert forecast.out == sum(span.nbytes for span in out)
    assert forecast.back == sum(span.nbytes for span in back)
    for lane in (out, back):
        assert all(one.end <= other.start for one, other in itertools.pairwise(lane))


@FEWER
@given(st.data())
def test_the_staircase_of_held_bytes_rises_to_the_peak_and_never_below_zero(
    traces: ModuleType, data: st.DataObject
) -> None:
    trace = data.draw(traces.passes())
    forecast = make_plan(trace, data.draw(traces.LINKS), budget=data.draw(st.integers(0, trace.saved))).forecast
    assert max(held for _, held in forecast.held) == forecast.held_peak
    assert min(held for _, held in forecast.held) == 0
    times = [when for when, _ in forecast.held]
    assert times == sorted(times)
