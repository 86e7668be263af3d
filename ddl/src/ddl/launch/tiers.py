"""Which hosts share a rack, from measured bandwidths. Pure: the plan of the measurement, and what follows from it.

A rack's uplink is slower than its hosts together, which a single pair of hosts cannot see: it has the uplink to itself.
So the probe lets pairs talk at once. In a round every host talks to at most one other, both ways; over the rounds the
pairs are shuffled, so that in some rounds many of a rack's hosts talk to other racks, and share its uplink.

What was seen is then explained: a partition of the hosts into racks predicts each flow of each round (links of one
rate, an uplink a rack, shared fairly by the flows that cross it), and the partition that explains the flows best, with
few racks, is the answer. A single flow that is off by 10% decides nothing, because all flows of all rounds have a say.

What cannot be told from bandwidths is not claimed. Uplinks that carry all that their hosts can send are no tier. Where
every rack has one host, uplinks look like slower links, and hosts with equal ones are answered as one rack: both are
reduced in the same way.
Latency is reported for each tier and decides nothing: between switches it differs by less than the noise of a kernel.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf, log
from statistics import median

EXTRA_ROUNDS = 14  # beyond those in which every pair talks once; with 100 ms a round, 8 hosts take 2.1 s
MOST_ROUNDS = 24
RACK_PRICE = 0.4  # what a further rack must explain, in the unit of `_cost`
_EXHAUSTIVE = 6  # up to so many hosts every partition is tried: 203 of them

Pair = tuple[int, int]
Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Flow:
    """What a round saw from one host to another: bytes a second, and seconds for a small message to go there."""

    source: int
    target: int
    bandwidth: float
    latency: float = 0.0


@dataclass(frozen=True)
class Measurement:
    """Flows between `hosts` hosts, in rounds: those of one round were in flight together."""

    hosts: int
    rounds: tuple[tuple[Flow, ...], ...]

    @classmethod
    def of_matrices(
        cls,
        bandwidth: Sequence[Sequence[float]],
        latency: Sequence[Sequence[float]],
        together: Iterable[tuple[Flow, ...]] = (),
    ) -> Measurement:
        """From matrices [source][target] of pairs that were measured alone, and rounds of pairs `together`."""
        count = len(bandwidth)
        if any(len(row) != count for row in (*bandwidth, *latency)) or len(latency) != count:
            raise ValueError("bandwidth, latency: expected square matrices of one size")
        alone = tuple(
            (
                Flow(one, other, bandwidth[one][other], latency[one][other]),
                Flow(other, one, bandwidth[other][one], latency[other][one]),
            )
            for one in range(count)
            for other in range(one + 1, count)
        )
        return cls(count, (*alone, *together))


@dataclass(frozen=True)
class Tiers:
    """Racks of hosts, by their numbers; rates in bytes a second, latencies in seconds (0: nothing measured it)."""

    racks: Groups
    link: float  # of a host, within its rack
    uplinks: tuple[float, ...]  # of each rack, for all its hosts together; empty where there is one rack
    near: float  # latency within a rack
    far: float  # latency between racks
    reason: str


def probe_rounds(hosts: int, extra: int = EXTRA_ROUNDS, most: int = MOST_ROUNDS) -> tuple[tuple[Pair, ...], ...]:
    """Which pairs talk at once, round by round: first every pair once (as far as `most` goes), then shuffled pairs.

    The same on every rank, without a word between them. With an odd number of hosts one rests in each round.
    """
    if hosts < 2:
        return ()
    shuffle = random.Random(hosts)
    rounds = list(_tournament(hosts))
    if len(rounds) > most - extra:
        shuffle.shuffle(rounds)
        rounds = rounds[: max(1, most - extra)]
    if hosts > 3:  # with three or fewer, there is only one pair at a time
        for _ in range(extra):
            order = shuffle.sample(range(hosts), hosts)
            rounds.append(tuple(sorted(_sorted(*pair) for pair in zip(order[::2], order[1::2], strict=False))))
    return tuple(rounds)


def _tournament(hosts: int) -> Iterator[tuple[Pair, ...]]:
    """Every pair once in as few rounds as possible: one stands still, the others go round."""
    ring: list[int | None] = [*range(hosts), *([None] if hosts % 2 else [])]
    half = len(ring) // 2
    for _ in range(len(ring) - 1):
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        yield tuple(sorted(_sorted(one, other) for one, other in pairs if one is not None and other is not None))
        ring = [ring[0], ring[-1], *ring[1:-1]]


def _sorted(one: int, other: int) -> Pair:
    return (one, other) if one < other else (other, one)


def find(measured: Measurement) -> Tiers:
    """The racks that explain the flows best. Raises ValueError for a bandwidth that is not above 0."""
    for flow in (flow for flows in measured.rounds for flow in flows):
        if not flow.bandwidth > 0:  # NaN fails this too
            raise ValueError(f"bandwidth from host {flow.source} to {flow.target}: {flow.bandwidth}; expected above 0")
    if measured.hosts < 2 or not any(measured.rounds):
        return _answer(measured, (tuple(range(measured.hosts)),), "no more than one host" if measured.hosts < 2 else "")
    best = _search(measured)
    if len(best) == 1:
        return _answer(measured, best, "no uplink is slower than its hosts together: one tier")
    flat = _cost(measured, (tuple(range(measured.hosts)),))
    return _answer(
        measured,
        best,
        f"{len(best)} racks leave {_cost(measured, best) / flat:.0%} of what one rack leaves unexplained",
    )


def _search(measured: Measurement) -> Groups:
    @cache
    def price(racks: Groups) -> float:
        return _price(measured, racks)

    if measured.hosts <= _EXHAUSTIVE:
        return min(_partitions(measured.hosts), key=price)
    # From both ends: one rack that is parted, and single hosts that are joined. The better end wins.
    starts = (_by_evidence(measured), (tuple(range(measured.hosts)),), tuple((host,) for host in range(measured.hosts)))
    return min((_descend(start, price) for start in starts), key=price)


def _descend(racks: Groups, price: Callable[[Groups], float]) -> Groups:
    """Change the partition as long as it gets better: join two racks, or move a host to another or a new one."""
    while True:
        better = min(_neighbours(racks), key=price)
        if price(better) >= price(racks):
            return racks
        racks = better


def _neighbours(racks: Groups) -> Iterator[Groups]:
    for at, rack in enumerate(racks):
        for to in range(at + 1, len(racks)):
            yield _canonical([*racks[:at], *racks[at + 1 : to], *racks[to + 1 :], rack + racks[to]])
        for host in rack:
            left = tuple(one for one in rack if one != host)
            rest = [*racks[:at], left, *racks[at + 1 :]]
            for to in range(len(racks)):
                if to != at:
                    yield _canonical([*rest[:to], (*rest[to], host), *rest[to + 1 :]])
            if left:
                yield _canonical([*rest, (host,)])


def _by_evidence(measured: Measurement) -> Groups:
    """A start: hosts are kept apart where a flow between them was slow, and put together greedily otherwise."""
    fast = max(flow.bandwidth for flows in measured.rounds for flow in flows)
    slow = {
        _sorted(flow.source, flow.target) for flows in measured.rounds for flow in flows if flow.bandwidth < 0.7 * fast
    }
    racks: list[list[int]] = []
    for host in range(measured.hosts):
        free = [rack for rack in racks if not any(_sorted(one, host) in slow for one in rack)]
        if free:
            free[0].append(host)
        else:
            racks.append([host])
    return _canonical(racks)


def _partitions(hosts: int) -> Iterator[Groups]:
    def place(host: int, racks: list[list[int]]) -> Iterator[Groups]:
        if host == hosts:
            yield tuple(map(tuple, racks))
            return
        for rack in racks:
            rack.append(host)
            yield from place(host + 1, racks)
            rack.pop()
        racks.append([host])
        yield from place(host + 1, racks)
        racks.pop()

    return place(0, [])


def _canonical(racks: Iterable[Sequence[int]]) -> Groups:
    return tuple(sorted(tuple(sorted(rack)) for rack in racks if rack))


def _price(measured: Measurement, racks: Groups) -> float:
    """What is to be as low as possible. Racks of one host each are none: they explain any rates of single links."""
    if len(racks) == measured.hosts:
        return inf
    return _cost(measured, racks) + RACK_PRICE * (len(racks) - 1)


def _cost(measured: Measurement, racks: Groups) -> float:
    """The sum of squares of how far each flow is from what `racks` predict, as logarithms of ratios."""
    link, uplinks = _rates(measured, racks)
    rack_of = {host: at for at, rack in enumerate(racks) for host in rack}
    total = 0.0
    for flows in measured.rounds:
        predicted = _fair([(rack_of[flow.source], rack_of[flow.target]) for flow in flows], link, uplinks)
        total += sum(log(flow.bandwidth / rate) ** 2 for flow, (rate, _) in zip(flows, predicted, strict=True))
    return total


def _rates(measured: Measurement, racks: Groups) -> tuple[float, list[float]]:
    """The rates of links and uplinks that explain the flows best, once the racks are given.

    A link's is the median within racks. An uplink carries at least what was ever seen over it at once; from there, the
    flows that it holds up say by how much that was wrong.
    """
    rack_of = {host: at for at, rack in enumerate(racks) for host in rack}
    inside = [
        flow.bandwidth for flows in measured.rounds for flow in flows if rack_of[flow.source] == rack_of[flow.target]
    ]
    highest = max(flow.bandwidth for flows in measured.rounds for flow in flows)
    link = median(inside) if inside else highest
    seen = [0.0] * len(racks)
    for flows in measured.rounds:
        sums: dict[tuple[str, int], float] = {}
        for flow in flows:
            source, target = rack_of[flow.source], rack_of[flow.target]
            if source != target:
                for key in (("up", source), ("down", target)):
                    sums[key] = sums.get(key, 0.0) + flow.bandwidth
        for (_, rack), total in sums.items():
            seen[rack] = max(seen[rack], total)
    uplinks = [total or link for total in seen]
    wrong: list[list[float]] = [[] for _ in racks]
    for flows in measured.rounds:
        shares = _fair([(rack_of[flow.source], rack_of[flow.target]) for flow in flows], link, uplinks)
        for flow, (rate, narrowest) in zip(flows, shares, strict=True):
            if narrowest is not None:
                wrong[narrowest].append(flow.bandwidth / rate)
    return link, [rate * (median(by) if by else 1.0) for rate, by in zip(uplinks, wrong, strict=True)]


def _fair(flows: Sequence[Pair], link: float, uplinks: Sequence[float]) -> list[tuple[float, int | None]]:
    """The rate of each flow (source rack, target rack), and the rack whose uplink holds it up (None: its own link).

    The narrowest uplink is shared equally by its flows, then the next by those that are left.
    """
    rates: list[tuple[float, int | None]] = [(link, None)] * len(flows)
    left: dict[tuple[str, int], float] = {}
    users: dict[tuple[str, int], set[int]] = {}
    for at, (source, target) in enumerate(flows):
        if source != target:
            for key in (("up", source), ("down", target)):
                left[key] = uplinks[key[1]]
                users.setdefault(key, set()).add(at)
    while users:
        share, key = min((left[key] / len(at), key) for key, at in users.items())
        if share >= link:
            break
        for at in users.pop(key):
            rates[at] = (share, key[1])
            source, target = flows[at]
            other = ("down", target) if key[0] == "up" else ("up", source)
            left[other] -= share
            users[other].discard(at)
            if not users[other]:
                del users[other]
    return rates


def _answer(measured: Measurement, racks: Groups, reason: str) -> Tiers:
    rack_of = {host: at for at, rack in enumerate(racks) for host in rack}
    flows = [flow for flows in measured.rounds for flow in flows]
    near = [flow.latency for flow in flows if rack_of[flow.source] == rack_of[flow.target] and flow.latency]
    far = [flow.latency for flow in flows if rack_of[flow.source] != rack_of[flow.target] and flow.latency]
    link, uplinks = _rates(measured, racks) if flows else (0.0, [])
    return Tiers(
        racks,
        link,
        tuple(uplinks) if len(racks) > 1 else (),
        min(near, default=0.0),
        min(far, default=0.0),
        reason or "nothing was measured",
    )
