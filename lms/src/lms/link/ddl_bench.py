"""Records of `ddlrun bench --json` as profiles: the network link between the hosts.

An allreduce of B bytes among h hosts sends at least 2 (h - 1) / h x B over each host's link in each direction
(Patarasuk and Yuan, 2009), and both directions are busy at once: that over its time is the rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lms import documents
from lms.errors import UsageError
from lms.link.profile import Ceiling, MeasuredLink, Profile
from lms.link.series import SHORTEST, Direction, Series, point
from lms.units import format_size

_KEYS = {"what", "ranks", "hosts", "turns", "network"}
_MOST_RANKS = 1 << 32
_DDL = "DDL"  # what ddlrun bench calls itself among the contestants


def is_one(document: Mapping[str, object]) -> bool:
    """Whether it is a record of `ddlrun bench`."""
    return document.keys() >= _KEYS


def profile(document: Mapping[str, object], where: str) -> Profile:
    """The network link of the record that was read from `where`. Raises UsageError if it has none, or is damaged."""
    try:
        hosts = documents.whole(document["hosts"], "hosts", _MOST_RANKS, 1)
        ranks = documents.whole(document["ranks"], "ranks", _MOST_RANKS, hosts)
        if hosts > 1:
            return _profile(document, hosts, ranks)
    except ValueError as error:
        raise UsageError(f"{where!r}: a damaged record of ddlrun bench ({error}); run it again") from None
    raise UsageError(f"{where!r}: ddlrun bench ran on one host and used no network link; run it on several (-H)")


def _profile(document: Mapping[str, object], hosts: int, ranks: int) -> Profile:
    share = 2 * (hosts - 1) / hosts
    turns = [_turn(one, f"turns[{at}]") for at, one in enumerate(documents.items(document["turns"], "turns"))]
    ours = sorted(((nbytes, seconds) for contestant, nbytes, seconds in turns if contestant == _DDL))
    points = [point(round(share * nbytes), seconds) for nbytes, seconds in ours]
    if not points:
        raise ValueError(f"nothing was timed of {_DDL}")
    ways: tuple[Direction, ...] = ("out", "back")
    # An allreduce answers when the last of its many messages has arrived, so its shortest time is no message's.
    series = tuple(replace(Series.of(way, _DDL, points), latency=0.0) for way in ways)
    largest = format_size(points[-1].nbytes / share)
    link = MeasuredLink(
        "network",
        "network",
        f"allreduce among {hosts} hosts, {ranks} ranks, up to {largest}",
        series,
        _ceiling(document["network"], hosts, ranks),
        (f"the rate is that of an allreduce by {_DDL}, with both ways busy: a plain transfer may be faster",),
    )
    names = documents.items(document.get("host_names") or [], "host_names")
    return Profile(
        name=", ".join(documents.text(one, "host_names") for one in names) or f"{hosts} hosts",
        origin="measured",
        links=(link,),
        machine=_facts(document, "machine") | _facts(document, "versions"),
        when=documents.text(document.get("date", ""), "date"),
    )


def _turn(value: object, where: str) -> tuple[str, int, list[float]]:
    """The contestant, the bytes and the times in seconds."""
    turn = documents.mapping(value, where)
    times = documents.items(turn.get("seconds"), f"{where}.seconds")
    if not times:
        raise ValueError(f"{where}.seconds: expected one or more, found none")
    return (
        documents.text(turn.get("contestant"), f"{where}.contestant"),
        documents.nbytes(turn.get("bytes"), f"{where}.bytes", 1),
        [documents.seconds(one, f"{where}.seconds[{at}]", SHORTEST) for at, one in enumerate(times)],
    )


def _facts(document: Mapping[str, object], name: str) -> dict[str, str]:
    """What the record says of the machine or the versions: texts and whole numbers."""
    found = documents.mapping(document.get(name) or {}, name)
    return documents.texts({key: str(one) if isinstance(one, int) else one for key, one in found.items()}, name)


def _ceiling(value: object, hosts: int, ranks: int) -> Ceiling | None:
    """The rate of a host's link if the record describes the network: that of the first tier that joins whole hosts."""
    if value is None:
        return None
    network = documents.mapping(value, "network")
    name = documents.text(network.get("name") or "the network", "network.name")
    below = 1
    for at, one in enumerate(documents.items(network.get("tiers"), "network.tiers")):
        where = f"network.tiers[{at}]"
        tier = documents.mapping(one, where)
        size = documents.whole(tier.get("size"), f"{where}.size", _MOST_RANKS, 1)
        rate = documents.rate(tier.get("bandwidth"), f"{where}.bandwidth")
        kind = documents.text(tier.get("name"), f"{where}.name")
        if below >= ranks // hosts and size > 1:
            return Ceiling(rate, rate, f"as described: {name}, tier {kind}")
        below *= size
    return None
