"""ForestColl's optimum against all cuts of small graphs, which are tried one by one."""

import itertools
import random
import sys

import pytest

from ddl.planning import forestcoll, interface
from ddl.planning.forestcoll import Graph
from ddl.planning.network import DEFAULT, Network, changed, parse_odd, with_odd

pytest.importorskip("scipy")


def by_all_cuts(graph: Graph) -> float:
    """The least of what leaves a set of nodes that lacks a rank, for each rank inside it."""
    least = float("inf")
    for size in range(1, graph.nodes):
        for chosen in itertools.combinations(range(graph.nodes), size):
            inside = set(chosen)
            ranks = sum(node < graph.ranks for node in inside)
            if not 0 < ranks < graph.ranks:
                continue
            leaving = sum(rate for (a, b), rate in graph.edges.items() if a in inside and b not in inside)
            least = min(least, leaving / ranks)
    return least


def check(graph: Graph) -> None:
    found = forestcoll.optimum(graph)
    assert found.rate == pytest.approx(by_all_cuts(graph), rel=1e-6)
    assert found.rate == pytest.approx(found.capacity / len(found.inside))
    assert 0 < len(found.inside) < graph.ranks


@pytest.mark.parametrize("seed", range(25))
def test_of_a_random_graph_it_is_the_least_of_all_cuts(seed: int) -> None:
    chance = random.Random(seed)
    ranks, switches = chance.randint(2, 5), chance.randint(0, 3)
    nodes = ranks + switches
    edges = {}
    for node in range(nodes):  # a cycle, so that each reaches each, and some more
        edges[node, (node + 1) % nodes] = chance.choice([1.0, 2.0, 2.5, 10.0]) * 1e9
    for pair in itertools.permutations(range(nodes), 2):
        if chance.random() < 0.4:
            edges[pair] = chance.choice([1.0, 3.0, 7.5]) * 1e9
    check(Graph(ranks, nodes, edges))


def test_of_a_ring_and_of_a_star_it_is_what_the_paper_s_formula_gives() -> None:
    ring = Graph(6, 6, {(one, (one + way) % 6): 1e9 for one in range(6) for way in (1, -1)})
    assert forestcoll.optimum(ring).rate == pytest.approx(2e9 / 5)  # into one rank: five shards over two links
    star = Graph(4, 5, {pair: 1e9 for rank in range(4) for pair in ((rank, 4), (4, rank))})
    assert forestcoll.optimum(star).rate == pytest.approx(1e9 / 3)


@pytest.mark.parametrize(
    ("words", "odd"),
    [
        ({"ranks": 2, "hosts": 2}, ()),
        ({"ranks": 4}, ("rank2=1gbit",)),
        ({"ranks": 1, "hosts": 4, "racks": 2, "rates": (None, 25e6, 12.5e6)}, ()),
        ({"ranks": 2, "hosts": 2}, ("host1=1gbit", "host0=1")),
    ],
)
def test_of_a_described_network_it_is_the_least_of_all_cuts(words: dict[str, int], odd: tuple[str, ...]) -> None:
    check(forestcoll.graph_of(network(words, odd)))


def network(words: dict[str, int], odd: tuple[str, ...] = ()) -> Network:
    return with_odd(changed(DEFAULT, **words), [parse_odd(one) for one in odd])  # type: ignore[arg-type]


def test_where_no_child_is_odd_it_is_the_bound_by_cuts_and_else_no_less() -> None:
    for words in ({"ranks": 2, "hosts": 4, "racks": 2}, {"ranks": 8, "hosts": 8}, {"ranks": 5}):
        plain = network(words)
        found = forestcoll.optimum(forestcoll.graph_of(plain))
        assert found.seconds(1 << 26) == pytest.approx(interface.bounds(plain.tree, 1 << 26).cut)
    for odd in (("host1=1gbit",), ("host0=1", "host2=5"), ("rack1=4gbit", "host3=2gbit")):
        other = network({"ranks": 2, "hosts": 4, "racks": 2}, odd)
        found = forestcoll.optimum(forestcoll.graph_of(other))
        assert found.seconds(1 << 26) >= interface.bounds(other.tree, 1 << 26).cut * (1 - 1e-9)


def test_without_scipy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(forestcoll.SolverMissing, match=r"pip install '\./ddl\[plan\]'"):
        forestcoll.optimum(forestcoll.graph_of(network({"ranks": 2})))
