import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddl.launch.errors import CheckError
from ddl.launch.hosts import Allocation, Host
from ddl.launch.layout import choose
from ddl.launch.machine import Machine

Make = Callable[..., Machine]


def hosts(*slots: int | None, asked: bool = True) -> Allocation:
    return Allocation(tuple(Host(f"h{at}", count) for at, count in enumerate(slots)), "-H", asked)


def test_without_a_gpu_there_is_one_rank_a_socket(machine: Make) -> None:
    chosen = choose(hosts(None, None), {"h0": machine(), "h1": machine()})
    assert chosen.counts == (2, 2)
    assert "one a socket" in chosen.reason


def test_with_gpus_there_is_one_rank_a_gpu(machine: Make) -> None:
    chosen = choose(hosts(None, None), {"h0": machine(gpus=4), "h1": machine(gpus=4)})
    assert chosen.counts == (4, 4)
    assert chosen.reason == "one a GPU"


def test_slots_say_how_many_ranks_where_there_is_no_gpu(machine: Make) -> None:
    assert choose(hosts(3, 3), {"h0": machine(), "h1": machine()}).counts == (3, 3)


def test_slots_bound_the_ranks_of_a_host_with_gpus(machine: Make) -> None:
    gpus = {"h0": machine(gpus=4), "h1": machine(gpus=4)}
    assert choose(hosts(2, 64), gpus).counts == (2, 4)


def test_lsf_s_cores_are_no_number_of_ranks(machine: Make) -> None:
    assert choose(hosts(16, 16, asked=False), {"h0": machine(), "h1": machine()}).counts == (2, 2)


def test_accelerators_count_for_each_host() -> None:
    assert choose(hosts(None, None, None), {}, accelerators=6).counts == (6, 6, 6)
    assert choose(hosts(None, None, None), {}, accelerators=4, ranks=8).counts == (4, 4)


def test_ranks_are_spread_evenly_where_they_divide(machine: Make) -> None:
    assert choose(hosts(4, 4), {}, ranks=6).counts == (3, 3)
    gpus = {f"h{at}": machine(gpus=4) for at in range(3)}
    assert choose(hosts(None, None, None), gpus, ranks=6).counts == (2, 2, 2)


def test_ranks_fill_hosts_where_they_do_not_divide_and_leave_spares(machine: Make) -> None:
    chosen = choose(hosts(2, 2, 2), {}, ranks=4)
    assert (chosen.hosts, chosen.counts, chosen.spares) == (("h0", "h1"), (2, 2), ("h2",))


def test_a_host_that_could_take_all_ranks_takes_them_where_they_do_not_divide(machine: Make) -> None:
    chosen = choose(hosts(4, 4, 4), {}, ranks=4)
    assert (chosen.hosts, chosen.counts, chosen.spares) == (("h0",), (4,), ("h1", "h2"))
    assert choose(hosts(8, None), {}, ranks=5).counts == (5,)
    gpus = {f"h{at}": machine(gpus=8) for at in range(2)}
    assert choose(hosts(None, None), gpus, ranks=5).spares == ("h1",)
    assert choose(hosts(None, None), {}, ranks=5, accelerators=8).counts == (5,)


def test_hosts_that_nothing_is_known_of_share_the_ranks() -> None:
    assert choose(hosts(None, None), {}, ranks=5).counts == (3, 2)
    assert choose(hosts(16, 16, asked=False), {}, ranks=5).counts == (3, 2)
    assert choose(hosts(None), {}, ranks=8).counts == (8,)


def test_more_ranks_than_gpus_share_them(machine: Make) -> None:
    assert choose(hosts(None), {"h0": machine(gpus=2)}, ranks=4).counts == (4,)
    gpus = {f"h{at}": machine(gpus=2) for at in range(2)}
    assert choose(hosts(None, None), gpus, ranks=7).counts == (4, 3)


@pytest.mark.parametrize(
    ("allocation", "asked", "message"),
    [
        (hosts(2, 2), {"ranks": 5}, "5 ranks were asked for, 3 of them on h1, and it has 2 (of 4 in -H)"),
        (hosts(2), {"accelerators": 4}, "4 of them on h0, and it has 2"),
        (hosts(None, None), {"accelerators": 2, "ranks": 5}, "-np asks for 5, and --accelerators 2 on 2 hosts makes 4"),
    ],
)
def test_too_many_ranks_name_both_numbers(allocation: Allocation, asked: dict[str, int], message: str) -> None:
    with pytest.raises(CheckError, match=re.escape(message)):
        choose(allocation, {}, **asked)


def test_a_host_without_a_gpu_among_others_is_named(machine: Make) -> None:
    with pytest.raises(CheckError, match="h1 has none; leave it out"):
        choose(hosts(None, None), {"h0": machine(gpus=1), "h1": machine()})


@given(st.integers(1, 40), st.lists(st.integers(1, 8), min_size=1, max_size=6))
def test_every_rank_has_a_slot_or_the_error_says_so(ranks: int, slots: list[int]) -> None:
    if ranks > sum(slots):
        with pytest.raises(CheckError, match="slots"):
            choose(hosts(*slots), {}, ranks=ranks)
        return
    chosen = choose(hosts(*slots), {}, ranks=ranks)
    assert sum(chosen.counts) == ranks
    assert all(count <= slots[int(host[1:])] for host, count in zip(chosen.hosts, chosen.counts, strict=True))
    assert len(chosen.hosts) + len(chosen.spares) == len(slots)
