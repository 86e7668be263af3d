import pytest

from ddl.frontends.core import rows


def test_the_first_ranks_keep_one_row_more() -> None:
    assert rows.shares(7, 3) == [3, 2, 2]
    assert rows.shares(2, 3) == [1, 1, 0]


def test_an_alltoall_without_splits_sends_equal_parts() -> None:
    assert rows.splits_of(None, 6, 3) == [2, 2, 2]
    assert rows.splits_of((1, 0, 5), 6, 3) == [1, 0, 5]
    with pytest.raises(ValueError, match="5 rows cannot be divided equally among 3 ranks: give splits"):
        rows.splits_of(None, 5, 3)


@pytest.mark.parametrize("splits", [[6], [1, 2, 4], [7, 0, -1], [3, 3, 0, 0]])
def test_splits_that_do_not_add_up_are_named(splits: list[int]) -> None:
    with pytest.raises(ValueError, match="it must have 3 sizes, one for each rank, whose sum is 6"):
        rows.splits_of(splits, 6, 3)


def test_a_tensor_without_dimensions_has_no_rows() -> None:
    assert rows.rows_of((4, 2), "allgather") == 4
    with pytest.raises(ValueError, match="allgather of a tensor without dimensions"):
        rows.rows_of((), "allgather")
