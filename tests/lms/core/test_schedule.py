"""A schedule laid out by access."""

from lms.core.schedule import Course, Return, Schedule, Swap

TEN = (0,) * 10


def swap(tensor: int, *, after: int = 0, before: int = 9, reload: int | None = 5) -> Swap:
    return Swap(tensor, after, before, reload, write=True)


def order(*moves: Swap) -> list[int]:
    return [back.tensor for back in Course(Schedule(moves, TEN)).returns]


def test_moves_come_back_in_the_order_in_which_their_copies_may_start() -> None:
    assert order(swap(0, reload=7), swap(1, reload=5), swap(2, reload=6)) == [1, 2, 0]


def test_of_moves_that_may_start_back_together_the_one_that_is_read_first_comes_first() -> None:
    assert order(swap(0, before=9), swap(1, before=7), swap(2, before=8)) == [1, 2, 0]


def test_ties_are_broken_by_the_tensor_so_that_the_order_is_the_same_each_time() -> None:
    moves = (swap(2), swap(0), swap(1))
    assert order(*moves) == order(*moves[::-1]) == [0, 1, 2]


def test_a_move_that_need_not_come_back_is_left_out_and_one_that_comes_when_it_is_read_is_on_demand() -> None:
    course = Course(Schedule((swap(0, reload=None, before=10), swap(1), swap(2, reload=9)), TEN))
    assert [back.tensor for back in course.returns] == [1]
    assert course.on_demand == {(2, 9)}
    assert [move.tensor for move in course.starts[0]] == [0, 1, 2]


def test_a_move_that_only_writes_has_no_way_back() -> None:
    stays = swap(0, after=1, reload=1)
    course = Course(Schedule((stays,), TEN))
    assert (course.starts[1], course.returns, course.on_demand) == ([stays], [], set())


def test_a_move_that_goes_on_in_the_next_step_comes_back_in_the_one_after_it_left() -> None:
    moves = swap(0, after=8, reload=12, before=13), swap(1, after=8, reload=9, before=11), swap(2, reload=10, before=10)
    course = Course(Schedule(moves, TEN))
    assert course.begins_away == {0, 2}, "tensor 1 has started back by then"
    assert course.returns == [Return(0, 1, 1), Return(2, 3, 0), Return(9, 11, 1)]
    assert course.on_demand == {(2, 0)}


def test_the_next_start_is_the_first_one_from_an_access_on() -> None:
    course = Course(Schedule((swap(0, after=6), swap(1, after=2), swap(2, after=2)), TEN))
    assert [course.next_start(at) for at in (0, 2, 3, 6, 7)] == [2, 2, 6, 6, 10]
