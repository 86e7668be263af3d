"""What the benchmark derives from a recorded pass."""

from __future__ import annotations

from types import ModuleType

from sessions import forced_again, held_at_floor


def test_a_record_comes_back_twice_when_another_between_its_uses_has_no_room_beside_it(traces: ModuleType) -> None:
    tape = traces.Tape()
    small, large, other = tape.new(10), tape.new(30), tape.new(20)
    for record in (small, large, other):
        tape.access("write", record, 1.0)
    for record in (small, large, small, other, other):
        tape.access("read", record, 1.0)
    trace = tape.trace()
    assert forced_again(trace, 40) == 0
    assert forced_again(trace, 39) == 10
    tape.pinned.add(large)
    assert forced_again(tape.trace(), 39) == 0


def test_what_is_in_hand_at_the_floor_belongs_to_lms(traces: ModuleType) -> None:
    tape = traces.Tape()
    small, large = tape.new(10), tape.new(30)
    for record in (small, large):
        tape.access("write", record, 1.0)
    for record in (large, small):
        tape.access("read", record, 1.0)
    trace = tape.trace(base=100, scratch=(0, 0, 0, 50, 0))
    assert held_at_floor(trace) == 30
    assert held_at_floor(tape.trace()) == 0
    assert held_at_floor(tape.trace(base=100, scratch=(0, 0, 0, 0, 50))) == 10  # it lies after the last access
