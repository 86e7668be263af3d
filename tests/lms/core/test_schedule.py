"""The order in which a schedule's moves come back."""

from lms.core.schedule import Move, Schedule


def move(record: int, *, after: int = 0, before: int = 9, fetch: int = 5) -> Move:
    return Move(record, after, before, fetch, write=True)


def test_moves_come_back_in_the_order_in_which_their_copies_start() -> None:
    schedule = Schedule((move(0, fetch=7), move(1, fetch=5), move(2, fetch=6)), cap=())
    assert [m.record for m in schedule.returns(10)] == [1, 2, 0]


def test_of_moves_that_may_start_back_together_the_one_that_is_used_first_comes_first() -> None:
    schedule = Schedule((move(0, before=9), move(1, before=7), move(2, before=8)), cap=())
    assert [m.record for m in schedule.returns(10)] == [1, 2, 0]


def test_a_move_that_need_not_come_back_within_the_pass_is_left_out() -> None:
    schedule = Schedule((move(0, fetch=10, before=10), move(1)), cap=())
    assert [m.record for m in schedule.returns(10)] == [1]


def test_ties_are_broken_by_the_record_so_that_the_order_is_the_same_each_time() -> None:
    moves = (move(2), move(0), move(1))
    assert Schedule(moves, cap=()).returns(10) == Schedule(moves[::-1], cap=()).returns(10)
