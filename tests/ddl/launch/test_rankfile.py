import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddl.launch.errors import CheckError
from ddl.launch.hosts import Allocation, Host
from ddl.launch.machine import Machine
from ddl.launch.rankfile import Place, bound, hydra_binding, parse, place, to_hydra, to_openmpi

Make = Callable[..., Machine]
ALLOCATION = Allocation((Host("a", 2), Host("b")), "-H a:2,b")


def test_consecutive_ranks_share_a_host() -> None:
    assert [one.host for one in place(["a", "b"], [2, 2], {})] == ["a", "a", "b", "b"]


def test_the_original_s_order_goes_round_the_hosts() -> None:
    places = place(["a", "b", "c", "d"], [2, 2, 2, 2], {}, order="hosts")
    assert [one.host for one in places] == ["a", "b", "c", "d", "a", "b", "c", "d"]
    assert [one.local_rank for one in places] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_a_rank_gets_the_socket_of_its_gpu(machine: Make) -> None:
    places = place(["a"], [4], {"a": machine(gpus=4)})
    assert [one.socket for one in places] == [0, 0, 1, 1]
    assert to_openmpi(places) == (
        "rank 0=a slot=0:*\nrank 1=a slot=0:*\nrank 2=a slot=1:*\nrank 3=a slot=1:*\n"
    )  # fmt: skip


def test_ranks_without_a_gpu_are_spread_over_the_sockets(machine: Make) -> None:
    assert [one.socket for one in place(["a"], [4], {"a": machine()})] == [0, 0, 1, 1]
    assert [one.socket for one in place(["a"], [3], {"a": machine()})] == [0, 0, 1]
    assert [one.socket for one in place(["a"], [1], {"a": machine()})] == [0]


def test_a_host_that_nothing_is_known_of_is_not_bound(machine: Make) -> None:
    places = place(["a", "b"], [1, 1], {"a": machine()})
    assert [one.socket for one in places] == [0, None]
    assert not bound(places)


def test_hydra_s_host_file_and_map() -> None:
    assert to_hydra(place(["a", "b"], [2, 1], {})) == ("a:2\nb:1\n", "0,0,1")
    assert to_hydra(place(["a", "b"], [2, 2], {}, order="hosts")) == ("a:2\nb:2\n", "0,1,0,1")


def test_hydra_binds_the_same_local_ranks_on_every_host_or_none(machine: Make) -> None:
    same = {"a": machine(), "b": machine()}
    assert hydra_binding(place(["a", "b"], [2, 2], same), same) == "user:0+1+2+3,4+5+6+7"
    other = {"a": machine(), "b": machine(cores=2)}
    assert hydra_binding(place(["a", "b"], [2, 2], other), other) == ""
    assert hydra_binding(place(["a"], [2], {}), {}) == ""


def test_a_rank_file_of_the_user_s_is_read() -> None:
    text = "rank 1=b slot=0:1\n# a comment\nrank 0=a slots=0-3\nrank 2=b slot=1:*\n"
    assert parse(text, "f", ALLOCATION) == (
        Place(0, "a", 0, slot="0-3"),
        Place(1, "b", 0, slot="0:1"),
        Place(2, "b", 1, slot="1:*"),
    )
    assert to_openmpi(parse(text, "f", ALLOCATION)).startswith("rank 0=a slot=0-3\nrank 1=b slot=0:1\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rank 0=a", "f, line 1: 'rank 0=a'; expected: rank N=HOST slot=CORES"),
        ("rank 0=a slot=0\nrank 0=b slot=0", "f, line 2: rank 0 is listed twice"),
        ("rank 0=a slot=0\nrank 2=b slot=0", "rank 1 is missing"),
        ("", "rank 0 is missing"),
        ("rank 0=c slot=0", "rank 0 is on 'c', and the hosts are a, b (-H a:2,b)"),
        ("rank 0=a slot=0\nrank 1=a slot=1\nrank 2=a slot=2", "it puts 3 ranks on a, which has 2 slots"),
    ],
)
def test_an_error_in_a_rank_file_is_named(text: str, message: str) -> None:
    with pytest.raises(CheckError, match=re.escape(message)):
        parse(text, "f", ALLOCATION)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.sampled_from(["ranks", "hosts"]))
def test_every_rank_has_one_place_and_local_ranks_count_from_zero(counts: list[int], order: str) -> None:
    hosts = [f"h{at}" for at in range(len(counts))]
    places = place(hosts, counts, {}, order=order)
    assert [one.rank for one in places] == list(range(sum(counts)))
    for host, count in zip(hosts, counts, strict=True):
        assert [one.local_rank for one in places if one.host == host] == list(range(count))
