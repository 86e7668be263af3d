"""The fastest allgather of a graph, after ForestColl (Zhao et al., arXiv:2402.06787, section on optimality).

Every rank has a shard that must reach every other rank. Let x be the rate at which each shard is sent. For any set of
nodes that lacks a rank, x times the ranks inside must leave the set. So x is at most the smallest quotient of exit
capacity and ranks inside, over all such sets; ForestColl's trees reach this. A reduce-scatter is an allgather
backwards. An allreduce made of both takes the sum of their times; if links differ, other allreduces may take less.

For each rank as the sink, a linear program maximises the x that all others can send to it. HiGHS (scipy) solves it, and
its dual is the cut. A max-flow solver would need a search over x, and scipy's takes whole numbers only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

from ddl.planning.network import Network

MOST_RANKS = 64


class SolverMissing(RuntimeError):
    """The solver is not installed: the message says how to install it."""


@dataclass(frozen=True)
class Graph:
    """Nodes 0 to `nodes` - 1: the first `ranks` compute, the others forward; bytes a second by (from, to)."""

    ranks: int
    nodes: int
    edges: Mapping[tuple[int, int], float]

    def leaving(self, inside: frozenset[int]) -> float:
        """Bytes a second out of a set of nodes."""
        return sum(rate for (one, other), rate in self.edges.items() if one in inside and other not in inside)


@dataclass(frozen=True)
class Optimum:
    """The rate of each rank's shard in bytes a second, and the cut that limits it: ranks inside, exit capacity."""

    rate: float
    inside: tuple[int, ...]
    capacity: float
    ranks: int

    def seconds(self, nbytes: int) -> float:
        """Seconds of a reduce-scatter and then an allgather of a buffer of `nbytes` bytes."""
        return 2 * nbytes / self.ranks / self.rate


def graph_of(network: Network) -> Graph:
    """The graph of a described network. Messages between hosts do not use the ranks' links of tier 0."""
    ranks = network.ranks
    hosts = network.ranks_below(1) if len(network.levels) > 1 else [range(ranks)]
    edges: dict[tuple[int, int], float] = {}
    nodes = ranks

    def link(child: tuple[int, int], switch: int, rate: float) -> None:
        out, into = child
        edges[out, switch] = edges[switch, into] = rate

    rates = network.bandwidths(0)
    for host in hosts:
        for rank in host:
            link((rank, rank), nodes, rates[rank])
        nodes += 1
    if len(hosts) > 1:
        children = []  # the node where their messages leave, and the node where they enter
        for host in hosts:
            for rank in host:
                edges[rank, nodes] = edges[nodes + 1, rank] = inf
            children.append((nodes, nodes + 1))
            nodes += 2
        for tier in range(1, len(network.levels)):
            last = tier + 1 == len(network.levels)
            parents = [range(len(children))] if last else network.below(tier + 1)
            rates = network.bandwidths(tier)
            for at, parent in enumerate(parents):
                for child in parent:
                    link(children[child], nodes + at, rates[child])
            children = [(nodes + at, nodes + at) for at in range(len(parents))]
            nodes += len(parents)
    return Graph(ranks, nodes, edges)


def optimum(graph: Graph) -> Optimum:
    """The best rate, with its cut. Raises SolverMissing without scipy; `graph` has 2 ranks or more, all connected."""
    try:
        from scipy.optimize import linprog
        from scipy.sparse import coo_array
    except ImportError:
        raise SolverMissing(
            "needs scipy: pip install './ddl[plan]' in a copy of the repository, or conda install scipy"
        ) from None
    scale = max(rate for rate in graph.edges.values() if rate < inf)
    edges = list(graph.edges)
    rows = [node for edge in edges for node in edge] + list(range(graph.ranks))
    columns = [at for at in range(len(edges)) for _ in range(2)] + [len(edges)] * graph.ranks
    values = [1.0, -1.0] * len(edges) + [-1.0] * graph.ranks  # what leaves a node is what enters it, plus its own shard
    balance = coo_array((values, (rows, columns)), (graph.nodes, len(edges) + 1)).tocsr()
    limits = [(0, None if graph.edges[edge] == inf else graph.edges[edge] / scale) for edge in edges] + [(0, None)]
    objective = [0.0] * len(edges) + [-1.0]
    best: Optimum | None = None
    for sink in range(graph.ranks):
        others = [node for node in range(graph.nodes) if node != sink]
        solved: Any = linprog(objective, A_eq=balance[others], b_eq=[0.0] * len(others), bounds=limits, method="highs")
        if solved.status != 0:
            raise ArithmeticError(f"the linear program of rank {sink} was not solved: {solved.message}")
        rate = float(solved.x[-1]) * scale
        if best is None or rate < best.rate * (1 - 1e-9):
            potentials = dict(zip(others, map(abs, solved.eqlin.marginals), strict=True))
            best = _cut(graph, potentials)
            if abs(best.rate - rate) > 1e-6 * rate:
                raise ArithmeticError(f"rank {sink}: the cut allows {best.rate:g} bytes/s, the flow has {rate:g}")
    assert best is not None
    return best


def _cut(graph: Graph, potentials: Mapping[int, float]) -> Optimum:
    """The tightest of the cuts between nodes of higher and of lower potential in the dual."""
    found: list[Optimum] = []
    for least in sorted({round(value, 9) for value in potentials.values()} - {0.0}):
        inside = frozenset(node for node, value in potentials.items() if value >= least - 1e-9)
        ranks = tuple(node for node in sorted(inside) if node < graph.ranks)
        if ranks:
            capacity = graph.leaving(inside)
            found.append(Optimum(capacity / len(ranks), ranks, capacity, graph.ranks))
    return min(found, key=lambda one: one.rate)
