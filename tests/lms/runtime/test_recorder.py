"""A recorded pass as a trace: positions, times without LMS's own, bytes that LMS does not hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lms.runtime.recorder import Recorder

LABEL = ("block.1", "float32", (5, 2))


def access(machine: object, recorder: Recorder, kind: str, index: int, gap: float, hook: float, held: int = 0) -> None:
    machine.now += gap
    recorder.enter()
    machine.now += hook
    recorder.access(kind, index)
    recorder.leave(held, held)


Recorded = Callable[..., Recorder]


@pytest.fixture
def recorded(machine: object) -> Recorded:
    """A pass with two records. The script keeps the second."""

    def record(*, measure: bool = True, timed: bool = True) -> Recorder:
        machine.most = 100
        recorder = Recorder(machine, measure=measure, timed=timed)
        recorder.new(40, LABEL, pinned=False)
        access(machine, recorder, "write", 0, gap=1.0, hook=0.5, held=40)
        machine.most = 190
        recorder.new(8, LABEL, pinned=True)
        access(machine, recorder, "write", 1, gap=2.0, hook=0.25, held=40)
        machine.most = 170
        access(machine, recorder, "read", 1, gap=4.0, hook=0.0, held=40)
        access(machine, recorder, "read", 0, gap=8.0, hook=0.0, held=40)
        recorder.freed[1] = 3
        machine.now += 16.0
        recorder.finish()
        return recorder

    return record


def test_a_trace_says_when_each_record_was_saved_used_and_freed(recorded: Recorded) -> None:
    recorder = recorded()
    trace = recorder.trace(1000, {}, {"system": "test"})
    first, second = trace.tensors
    assert (trace.touches[0], first.freed, first.nbytes, first.pinned) == ((0, 3), 4, 40, False)
    assert (trace.touches[1], second.freed, second.pinned) == ((1, 2), 3, True)
    assert (first.module, first.dtype, first.shape) == LABEL
    assert [(a.kind, a.tensor) for a in trace.accesses] == [("write", 0), ("write", 1), ("read", 1), ("read", 0)]
    assert (trace.device, trace.capacity, dict(trace.machine)) == ("cpu", 1000, {"system": "test"})


def test_time_within_the_hooks_is_no_computation(recorded: Recorded) -> None:
    recorder = recorded()
    assert recorder.gaps() == [1.0, 2.0, 4.0, 8.0, 16.0]
    trace = recorder.trace(1000, {}, {})
    assert [a.seconds for a in trace.accesses] == [1.0, 2.0, 4.0, 8.0]
    assert trace.tail == 16.0


def test_a_timeline_shows_computation_and_hooks_one_after_the_other(recorded: Recorded) -> None:
    recorder = recorded()
    timeline = recorder.timeline()
    spans = [(span.lane, span.start, span.end) for span in timeline.spans]
    assert spans[:3] == [("compute", 0.0, 1.0), ("stall", 1.0, 1.5), ("compute", 1.5, 3.5)]
    assert timeline.spans[-1].end == 31.75
    assert timeline.held[0] == (0.0, 0)
    assert timeline.held[1] == (1.5, 40)


def test_bytes_that_lms_does_not_hold_are_the_peak_less_what_was_present(recorded: Recorded) -> None:
    recorder = recorded()
    trace = recorder.trace(1000, {}, {})
    assert [a.other for a in trace.accesses] == [100, 150, 130, 130]
    assert trace.tail_other == 130
    assert recorder.worst == 150
    assert recorder.peak == 190


def test_what_the_device_keeps_for_reuse_is_held_and_not_in_use(machine: object) -> None:
    machine.most, machine.idle = 100, 30
    recorder = Recorder(machine, measure=True, timed=True)
    recorder.new(40, LABEL, pinned=False)
    access(machine, recorder, "write", 0, gap=1.0, hook=0.5, held=40)
    recorder.finish()
    assert recorder.peak == 100
    assert recorder.other == [70, 30]


def test_a_pass_that_is_not_measured_says_so_with_zeros(recorded: Recorded, machine: object) -> None:
    recorder = recorded(measure=False)
    assert {a.other for a in recorder.trace(1000, {}, {}).accesses} == {0}
    assert machine.resets == 0


def test_a_pass_that_is_not_timed_has_equal_gaps(recorded: Recorded) -> None:
    recorder = recorded(timed=False)
    assert recorder.gaps() == [recorder.seconds / 5] * 5
    assert recorder.seconds > 0


def test_keys_tell_passes_apart_by_kind_record_and_bytes(recorded: Recorded) -> None:
    recorder = recorded()
    assert recorder.keys() == [("write", 0, 40), ("write", 1, 8), ("read", 1, 8), ("read", 0, 40)]


def test_a_pass_that_never_ends_stops_to_be_recorded(machine: object) -> None:
    recorder = Recorder(machine, measure=False, timed=True)
    recorder.MAX_ACCESSES = 3  # type: ignore[misc]
    recorder.new(8, LABEL, pinned=False)
    for _ in range(10):
        access(machine, recorder, "write", 0, 1.0, 1.0)
    assert recorder.truncated
    assert recorder.position == 3
    recorder.finish()
