"""What the benchmark derives from a recorded pass."""

from __future__ import annotations

from types import ModuleType

from sessions import forced_again


def test_a_record_comes_back_twice_when_another_between_its_uses_has_no_room_beside_it(traces: ModuleType) -> None:
    tape = traces.Tape()
    small, large, other = tape.new(10), tape.new(30), tape.new(20)
    for record in (small, large, other):
        tape.access("save", record, 1.0)
    for record in (small, large, small, other, other):
        tape.access("use", record, 1.0)
    trace = tape.trace()
    assert forced_again(trace, 40) == 0
    assert forced_again(trace, 39) == 10
    tape.pinned.add(large)
    assert forced_again(tape.trace(), 39) == 0
