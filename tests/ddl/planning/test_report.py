"""The witnesses that `ddlrun plan` prints, checked against a description of the network that these tests make.

Nothing here asks the code under test where a rank is or what a link carries: a network is nested lists of ranks, links
are looked up in the list, and numpy adds up what passes them.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import numpy as np
import pytest

from ddl.planning import report
from ddl.planning.network import Exceptions, Level, Network

S = 1 << 20


@dataclass
class Child:
    """A host, rack, ...: its link's bandwidth, and the ranks below it."""

    level: str
    number: int
    bandwidth: float
    ranks: list[int]


def made(seed: int) -> tuple[Network, list[Child]]:
    """A random network, described, and all its children, listed."""
    chance = random.Random(seed)
    names = ("rank", "host", "rack")
    sizes = [chance.randint(1, 4), chance.randint(1, 4), chance.randint(1, 3)][: chance.choice((1, 2, 3))]
    rates = [float(chance.choice((1, 2, 5, 10))) * 1e8 for _ in sizes]
    odd: list[Exceptions] = []
    children: list[Child] = []
    count = 1  # switches of the tier, outermost first
    below: list[list[list[int]]] = []
    for tier in range(len(sizes) - 1, -1, -1):
        numbers = itertools.count()
        groups = []
        for switch in range(count):
            size = sizes[tier]
            if tier + 1 < len(sizes) and chance.random() < 0.25:
                size = chance.randint(1, 5)
                odd.append(Exceptions(names[tier + 1], (switch,), size))
            groups.append([next(numbers) for _ in range(size)])
        below.insert(0, groups)
        count = sum(map(len, groups))
    ranks = [[rank] for rank in range(count)]
    for tier, (name, rate) in enumerate(zip(names, rates, strict=False)):
        for number, members in enumerate(ranks):
            slow = rate
            if chance.random() < 0.2:
                slow = float(chance.choice((1, 3, 7))) * 5e7
                odd.append(Exceptions(name, (number,), 0, slow))
            children.append(Child(name, number, slow, members))
        ranks = [[rank for child in group for rank in ranks[child]] for group in below[tier]]
    levels = tuple(
        Level(name, size, rate, chance.choice((0.0, 1e-5)))
        for name, size, rate in zip(names, sizes, rates, strict=False)
    )
    return Network(levels, odd=tuple(odd)), children


@pytest.mark.parametrize("seed", range(60))
def test_the_cut_s_witness_is_a_partition_whose_exits_carry_what_it_says(seed: int) -> None:
    network, children = made(seed)
    study = report.study(network, S, "float32", None)
    cut = report.to_dict(study)["witnesses"]["cut"]  # type: ignore[index]
    if network.ranks == 1:
        assert cut is None
        return
    if cut is None:
        assert study.bounds.cut == 0
        return
    every = set(range(max(max(child.ranks) for child in children) + 1))
    assert network.ranks == len(every)
    groups = [set(range(first, last + 1)) for first, last in cut["ranks"]]
    if rest := every - set().union(*groups):
        groups.append(rest)
    assert len(groups) == cut["groups"] >= 2
    assert sum(map(len, groups)) == len(every)
    assert cut["nbytes"] == 2 * (len(groups) - 1) * S
    around = [child for child in children if child.level == cut["level"] and set(child.ranks) in groups]
    into = []
    if rest:  # the way into the groups: one link around all of them, or the other direction of the only one's
        chosen = every - rest
        into = [child.bandwidth for child in children if set(child.ranks) == chosen]
    named = [c for c in around if cut["first"] <= c.number < cut["first"] + cut["count"]]
    assert len(named) == cut["count"]
    capacity = np.sum([child.bandwidth for child in named])
    if rest:
        capacity += min((rate for rate in into), default=np.nan) if len(named) > 1 else named[0].bandwidth
    assert cut["capacity"] == pytest.approx(capacity)
    assert study.bounds.cut == pytest.approx(cut["nbytes"] / cut["capacity"]) == pytest.approx(cut["seconds"])


@pytest.mark.parametrize("seed", range(60))
def test_no_cut_around_a_tier_or_a_child_binds_more(seed: int) -> None:
    network, children = made(seed)
    bound = report.study(network, S, "float32", None).bounds.cut
    tiers = [[child for child in children if child.level == level] for level in ("rank", "host", "rack")]
    for at, tier in enumerate(tiers):
        switches = max(1, len(tiers[at + 1])) if at < 2 else 1
        if len(tier) <= switches or (at == 0 and len(tiers[1]) > 1):
            continue  # nobody meets there, or ranks have a second way out
        rates = np.array([child.bandwidth for child in tier])
        assert bound >= 2 * (len(tier) - 1) * S / rates.sum() * (1 - 1e-9)
        assert bound >= S / rates.min() * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(60))
def test_the_ring_s_witness_is_a_link_that_its_messages_pass(seed: int) -> None:
    network, children = made(seed)
    study = report.study(network, S, "float32", None)
    ring = report.to_dict(study)["witnesses"]["ring"]  # type: ignore[index]
    ranks = network.ranks
    if ranks == 1:
        assert ring is None
        return
    (link,) = [c for c in children if (c.level, c.number) == (ring["level"], ring["child"])]
    assert link.bandwidth == ring["capacity"]
    # Each rank sends 2 (n-1) parts of an n-th to the next: those that leave the child are one rank's.
    sends = np.full(ranks, 2 * (ranks - 1) * S / ranks)
    leaving = [rank for rank in link.ranks if (rank + 1) % ranks not in link.ranks]
    assert len(leaving) == 1
    assert ring["nbytes"] == pytest.approx(sends[leaving].sum())
    assert study.bounds.ring == pytest.approx(ring["latency"] + ring["nbytes"] / ring["capacity"])
    worst = max(level.latency for level in network.levels)
    assert ring["latency"] <= 2 * (ranks - 1) * worst + 1e-12


@pytest.mark.parametrize("seed", range(60))
def test_the_dimensions_witnesses_add_up_each_over_a_link_that_carries_so_much(seed: int) -> None:
    network, children = made(seed)
    study = report.study(network, S, "float32", None)
    witnesses = report.to_dict(study)["witnesses"]
    terms = witnesses["hierarchical"]  # type: ignore[index]
    if any(one.size for one in network.odd):
        sizes = {tuple(sorted(len(c.ranks) for c in children if c.level == level.name)) for level in network.levels}
        if any(len(set(one)) > 1 for one in sizes):
            assert terms == []
            assert study.bounds.hierarchical == study.bounds.pipelined == 0
        return
    assert sum(term["seconds"] for term in terms) == pytest.approx(study.bounds.hierarchical)
    longest = max((term["seconds"] for term in terms), default=0)
    assert study.bounds.pipelined == pytest.approx(longest)
    dimensions = [level.size for level in network.levels]
    at = 0
    for tier, size in enumerate(dimensions):
        if size < 2:
            continue
        term, stride = terms[at], int(np.prod(dimensions[:tier]))
        at += 1
        (link,) = [c for c in children if (c.level, c.number) == (term["level"], term["child"])]
        # In this dimension a rank sends 2 (d-1)/d of what is left of the buffer; those below the link share it.
        each = 2 * (size - 1) / size * S / stride
        below = 1 if tier == 0 else len(link.ranks)
        assert term["nbytes"] == pytest.approx(each * below)
        assert term["capacity"] == link.bandwidth
        assert term["latency"] == pytest.approx(2 * (size - 1) * network.levels[tier].latency)


def test_every_bound_is_printed_with_its_witness() -> None:
    two = (Level("rank", 2, 5e9, 1e-6), Level("host", 2, 25e6, 3e-5), Level("rack", 2, 12.5e6, 3e-5))
    text = report.to_text(report.study(Network(two), 64 << 20, "float32", None))
    assert "5.37 s    128 MiB must leave rack 0-1, through 25 MB/s in all" in text
    assert "112 MiB through the link of rack 0 (12.5 MB/s), 420 us of latency" in text
    uneven = Network(two, odd=(Exceptions("host", (1,), 3), Exceptions("host", (2,), 0, 1e6)))
    text = report.to_text(report.study(uneven, 64 << 20, "float32", None))
    assert "128 MiB must leave host 2 and the others, through 2 MB/s in all" in text
    assert "tiers are uneven: there are no such dimensions" in text
    assert "but host 1:" in text
    assert "3 x rank" in text
