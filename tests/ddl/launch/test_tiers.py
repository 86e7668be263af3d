import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ddl.launch.tiers import Flow, Groups, Measurement, find, probe_rounds

LINK = 25e6  # bytes a second: 200 Mbit/s


@dataclass(frozen=True)
class Topology:
    """Racks of hosts in the order in which they are listed, and what each rack's uplink carries each way."""

    racks: Groups
    uplinks: tuple[float, ...]

    @property
    def hosts(self) -> int:
        return sum(map(len, self.racks))


@st.composite
def topologies(draw: st.DrawFn, most: int = 8, racks: tuple[int, int] = (1, 3)) -> Topology:
    """2 to `most` hosts, listed in any order; an uplink carries at most half of what its hosts can send together."""
    sizes = draw(
        st.lists(st.integers(1, most - 1), min_size=racks[0], max_size=racks[1]).filter(
            lambda one: 2 <= sum(one) <= most and max(one) > 1  # racks of one host each look like slower links
        )
    )
    order = draw(st.permutations(range(sum(sizes))))
    starts = [sum(sizes[:at]) for at in range(len(sizes))]
    groups = tuple(
        sorted(tuple(sorted(order[start : start + size])) for start, size in zip(starts, sizes, strict=True))
    )
    shares = draw(st.lists(st.floats(0.1, 0.5), min_size=len(groups), max_size=len(groups)))
    return Topology(groups, tuple(share * len(rack) * LINK for share, rack in zip(shares, groups, strict=True)))


def carried(topology: Topology, flows: Sequence[tuple[int, int]]) -> list[float]:
    """The rates of flows in flight together: all grow alike, and each stops where a link that it crosses is full."""
    rack_of = {host: at for at, rack in enumerate(topology.racks) for host in rack}
    crossed: list[set[tuple[str, int]]] = []
    capacity: dict[tuple[str, int], float] = {}
    for source, target in flows:
        links = {("host up", source), ("host down", target)}
        capacity |= dict.fromkeys(links, LINK)
        if rack_of[source] != rack_of[target]:
            for way, rack in (("up", rack_of[source]), ("down", rack_of[target])):
                links.add((way, rack))
                capacity[way, rack] = topology.uplinks[rack]
        crossed.append(links)
    rates = [0.0] * len(flows)
    growing = set(range(len(flows)))
    while growing:
        room = {}
        for link, most in capacity.items():
            users = [at for at in growing if link in crossed[at]]
            if users:
                room[link] = (most - sum(rates[at] for at in range(len(flows)) if link in crossed[at])) / len(users)
        step = min(room.values())
        for at in growing:
            rates[at] += step
        full = {link for link, left in room.items() if left <= step * (1 + 1e-9)}
        growing = {at for at in growing if not crossed[at] & full}
    return rates


def measured(topology: Topology, seed: int, noise: float = 0.1) -> Measurement:
    """What the planned rounds see on the topology, each figure wrong by up to `noise`."""
    chance = random.Random(seed)
    rounds = []
    for pairs in probe_rounds(topology.hosts):
        flows = [flow for one, other in pairs for flow in ((one, other), (other, one))]
        rates = carried(topology, flows)
        rounds.append(
            tuple(
                Flow(*flow, rate * chance.uniform(1 - noise, 1 + noise), 50e-6)
                for flow, rate in zip(flows, rates, strict=True)
            )
        )
    return Measurement(topology.hosts, tuple(rounds))


def test_the_tests_network_shares_as_it_should() -> None:
    two = Topology(((0, 1), (2, 3)), (LINK, LINK))
    assert carried(two, [(0, 2)]) == pytest.approx([LINK])  # a single pair sees no uplink
    assert carried(two, [(0, 2), (1, 3)]) == pytest.approx([LINK / 2, LINK / 2])
    assert carried(two, [(0, 1), (2, 3)]) == pytest.approx([LINK, LINK])


@settings(max_examples=60)
@given(topologies(), st.integers(0, 2**32))
@example(Topology(((0, 3, 5, 6), (1, 2, 4, 7)), (2 * LINK, 2 * LINK)), 1)
@example(Topology(((0, 7), (1, 6), (2, 3, 4, 5)), (LINK, LINK, 2 * LINK)), 2)
@example(Topology(((0, 1, 2, 3, 4, 5, 6), (7,)), (3.5 * LINK, 0.5 * LINK)), 3)
def test_the_racks_of_any_topology_are_found_in_any_order_under_noise(topology: Topology, seed: int) -> None:
    assert find(measured(topology, seed)).racks == topology.racks


@settings(max_examples=20)
@given(st.integers(2, 8), st.integers(0, 2**32))
def test_hosts_on_one_switch_are_one_rack(hosts: int, seed: int) -> None:
    found = find(measured(Topology((tuple(range(hosts)),), (LINK,)), seed))
    assert found.racks == (tuple(range(hosts)),)
    assert found.uplinks == ()
    assert found.link == pytest.approx(LINK, rel=0.1)


@pytest.mark.parametrize("hosts", [2, 3])
def test_racks_of_one_host_each_look_like_one_rack_of_slower_links(hosts: int) -> None:
    lonely = Topology(tuple((host,) for host in range(hosts)), (LINK / 2,) * hosts)
    found = find(measured(lonely, seed=5))
    assert found.racks == (tuple(range(hosts)),)
    assert found.link == pytest.approx(LINK / 2, rel=0.1)


def test_uplinks_are_measured_with_the_racks() -> None:
    found = find(measured(Topology(((0, 2), (1, 3)), (LINK / 2, LINK / 2)), seed=4, noise=0.02))
    assert found.racks == ((0, 2), (1, 3))
    assert found.uplinks == pytest.approx((LINK / 2, LINK / 2), rel=0.05)
    assert found.link == pytest.approx(LINK, rel=0.05)
    assert found.near == found.far == 50e-6
    assert re.fullmatch(r"2 racks leave \d+% of what one rack leaves unexplained", found.reason)


def test_pairs_that_are_measured_alone_count_too() -> None:
    slow = LINK / 4
    matrix = [
        [0.0 if one == other else LINK if one % 2 == other % 2 else slow for other in range(4)] for one in range(4)
    ]
    found = find(Measurement.of_matrices(matrix, [[1e-5] * 4] * 4))
    assert found.racks == ((0, 2), (1, 3))


def test_matrices_must_be_square_and_bandwidths_above_zero() -> None:
    with pytest.raises(ValueError, match="expected square matrices"):
        Measurement.of_matrices([[0, 1], [1]], [[0, 1], [1, 0]])
    with pytest.raises(ValueError, match="bandwidth from host 0 to 1: 0; expected above 0"):
        find(Measurement(2, ((Flow(0, 1, 0),),)))


def test_one_host_is_one_rack() -> None:
    assert find(Measurement(1, ())).racks == ((0,),)


@pytest.mark.parametrize("hosts", range(2, 11))
def test_every_pair_talks_and_nobody_talks_to_two_at_once(hosts: int) -> None:
    rounds = probe_rounds(hosts)
    for pairs in rounds:
        assert max(Counter(host for pair in pairs for host in pair).values()) == 1
    assert {pair for pairs in rounds for pair in pairs} == set(combinations(range(hosts), 2))
    assert len(rounds) <= 24


def test_the_plan_of_many_hosts_stays_short_and_is_the_same_everywhere() -> None:
    assert len(probe_rounds(200)) == 24
    assert probe_rounds(200) == probe_rounds(200)
    assert all(len(pairs) == 100 for pairs in probe_rounds(200))
    assert probe_rounds(1) == ()
