import re
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddl.launch.dimensions import choose
from ddl.launch.errors import CheckError
from ddl.launch.options import Mode


def test_mode_p_leaves_the_dimensions_to_libddl_where_nobody_says_more() -> None:
    left = choose([4, 4])
    assert left.sizes == ()
    assert str(left) == "libddl's choice"
    assert left.reason == "4 on each of 2 hosts; it measures the links between the hosts"
    assert choose([4]).reason == "4 on each of 1 host; the ranks share a host"


def test_hosts_are_one_rack_in_other_modes() -> None:
    assert choose([4, 4], mode=Mode("r")).sizes == (4, 2, 1, 1)


def test_racks_are_counted_in_an_aisle() -> None:
    assert choose([4] * 6, racks=2).sizes == (4, 3, 2, 1)
    assert choose([6] * 144, nodes=18, racks=4, aisles=2).sizes == (6, 18, 4, 2)
    assert choose([6] * 144, racks=4, aisles=2).sizes == (6, 18, 4, 2)


def test_hosts_with_different_numbers_of_ranks_have_no_dimensions() -> None:
    flat = choose([4, 3])
    assert flat.sizes == ()
    assert "4 + 3" in flat.reason


def test_the_user_s_own_dimensions_are_taken() -> None:
    assert choose([4, 3, 1], mode=Mode("r", (4, 2))).sizes == (4, 2)


@pytest.mark.parametrize(
    ("counts", "asked", "message"),
    [
        ([4, 4], {"mode": Mode("p", (4, 3, 1, 1))}, "-m p:4x3x1x1 multiplies to 12 ranks, and there are 8"),
        ([4, 4], {"racks": 3}, "3 racks x 1 aisles do not divide 2 hosts evenly"),
        ([4, 4], {"nodes": 4}, "4 nodes x 1 racks x 1 aisles is 4 hosts, and there are 2"),
        ([4, 3], {"mode": Mode("bnrr")}, "-m bnrr has a mode for each of 4 dimensions"),
    ],
)
def test_sizes_that_do_not_multiply_name_both_numbers(
    counts: list[int], asked: dict[str, object], message: str
) -> None:
    with pytest.raises(CheckError, match=re.escape(message)):
        choose(counts, **asked)  # type: ignore[arg-type]


@given(st.integers(1, 8), st.integers(1, 6), st.integers(1, 4), st.integers(1, 3))
def test_the_dimensions_multiply_to_the_ranks(ranks: int, nodes: int, racks: int, aisles: int) -> None:
    counts = [ranks] * (nodes * racks * aisles)
    assert prod(choose(counts, racks=racks, aisles=aisles).sizes) == sum(counts)
    assert prod(choose(counts, mode=Mode("r")).sizes) == sum(counts)
