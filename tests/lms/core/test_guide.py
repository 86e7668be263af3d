"""A plan and the sequence of accesses that it was made for."""

from types import ModuleType

import pytest

from lms.core.guide import Guide, Key, prefixes
from lms.core.plan import make_plan
from lms.link import Link

LINK = Link("test", 4.0, 4.0, 0.0)


def keys_of(sizes: list[int]) -> list[Key]:
    saves = [("write", record, nbytes) for record, nbytes in enumerate(sizes)]
    return saves + [("read", record, nbytes) for _, record, nbytes in reversed(saves)]


@pytest.fixture
def guide(traces: ModuleType) -> Guide:
    """Leads a pass of four equal records; one may stay."""
    trace = traces.chain([8] * 4, [1.0] * 4)
    return Guide(keys_of([8] * 4), trace, make_plan(trace, LINK, budget=8))


def test_it_expects_what_the_recorded_pass_did_at_that_position(guide: Guide) -> None:
    assert guide.expects(0, ("write", 0, 8))
    assert guide.expects(4, ("read", 3, 8))
    assert guide.expects(7, ("read", 0, 8))


@pytest.mark.parametrize(
    ("position", "key"),
    [(0, ("write", 1, 8)), (0, ("read", 0, 8)), (0, ("write", 0, 9)), (4, ("read", 0, 8)), (8, ("read", 0, 8))],
    ids=["another record", "another kind", "another size", "another order", "past the end"],
)
def test_it_does_not_expect_anything_else(position: int, key: Key, guide: Guide) -> None:
    assert not guide.expects(position, key)


@pytest.mark.parametrize("length", [0, 1, 5, 8])
def test_a_pass_that_began_with_the_same_accesses_may_follow_it(length: int, guide: Guide) -> None:
    assert guide.began_like(prefixes(keys_of([8] * 4)[:length]))


def test_a_pass_that_began_in_another_way_or_is_longer_may_not(guide: Guide) -> None:
    assert not guide.began_like(prefixes(keys_of([9] * 4)[:1]))
    assert not guide.began_like(prefixes([*keys_of([8] * 4)[:3], ("write", 3, 9)]))
    assert not guide.began_like(prefixes([*keys_of([8] * 4), ("read", 0, 8)]))


def test_moves_are_found_by_the_access_with_which_they_start_and_in_the_order_of_their_return(guide: Guide) -> None:
    assert guide.plan.moves
    for move in guide.plan.moves:
        assert move in guide.course.starts[move.after]
    assert sum(len(moves) for moves in guide.course.starts.values()) == len(guide.plan.moves)
    assert guide.course.returns == sorted(guide.course.returns)
    assert guide.course.on_demand == {(m.tensor, m.before) for m in guide.plan.moves if m.reload == m.before}


def test_it_can_take_another_plan_for_the_same_accesses(guide: Guide) -> None:
    kept = guide.trace
    guide.follow(kept, make_plan(kept, LINK, budget=32))
    assert (guide.course.starts, guide.course.returns, guide.course.on_demand) == ({}, [], set())
    guide.follow(kept, make_plan(kept, LINK, budget=0))
    assert {move.tensor for moves in guide.course.starts.values() for move in moves} == guide.plan.moved()
    assert guide.expects(0, ("write", 0, 8))


def test_it_knows_which_records_never_move(traces: ModuleType) -> None:
    tape = traces.Tape([8, 8], pinned={0})
    for record in (0, 1):
        tape.access("write", record, 1.0)
    for record in (1, 0):
        tape.access("read", record, 1.0)
    trace = tape.trace()
    assert Guide(keys_of([8, 8]), trace, make_plan(trace, LINK, budget=0)).pinned == [True, False]
