"""What `ddlrun bench --json` wrote, as a profile: the network link between its hosts, in the words of `lms link`.

An allreduce of B bytes among h hosts sends at least 2 (h - 1) / h x B over each host's link in each direction
(Patarasuk and Yuan, 2009), and both directions are busy at once: that over its time is the rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lms.errors import UsageError
from lms.link.profile import Ceiling, MeasuredLink, Profile
from lms.link.series import Direction, Series, point
from lms.units import format_size

_KEYS = {"what", "ranks", "hosts", "turns", "network"}
_DDL = "DDL"  # what ddlrun bench calls itself among the contestants


def is_one(document: Mapping[str, object]) -> bool:
    """Whether it is a record of `ddlrun bench`."""
    return document.keys() >= _KEYS


def profile(document: Mapping[str, object], where: str) -> Profile:
    """The network link of the record that was read from `where`. Raises UsageError where it has none, or is damaged."""
    try:
        hosts, ranks = int(str(document["hosts"])), int(str(document["ranks"]))
        if hosts < 2:
            raise UsageError(
                f"{where!r}: ddlrun bench ran on one host, where no network link has a part; run it on several (-H)"
            )
        return _profile(document, hosts, ranks)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{where!r}: a damaged record of ddlrun bench ({error!r}); run it again") from None


def _profile(document: Mapping[str, object], hosts: int, ranks: int) -> Profile:
    turns = document["turns"]
    if not isinstance(turns, list):
        raise TypeError("turns: expected a list")
    share = 2 * (hosts - 1) / hosts
    points = [
        point(round(share * turn["bytes"]), [float(one) for one in turn["seconds"]])
        for turn in sorted(turns, key=lambda turn: int(turn["bytes"]))
        if turn["contestant"] == _DDL
    ]
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
    machine = {f"{key}": str(value) for key, value in dict(document.get("machine") or {}).items()}  # type: ignore[call-overload]
    versions = {f"{key}": str(value) for key, value in dict(document.get("versions") or {}).items()}  # type: ignore[call-overload]
    names = document.get("host_names")
    return Profile(
        name=", ".join(map(str, names)) if isinstance(names, list) and names else f"{hosts} hosts",
        origin="measured",
        links=(link,),
        machine=machine | versions,
        when=str(document.get("date", "")),
    )


def _ceiling(network: object, hosts: int, ranks: int) -> Ceiling | None:
    """The rate of a host's link, where the network was described: the first tier that joins whole hosts."""
    if not isinstance(network, dict):
        return None
    below = 1
    for tier in network["tiers"]:
        if below >= ranks // hosts and tier["size"] > 1:
            rate = float(tier["bandwidth"])
            return Ceiling(rate, rate, f"as described: {network.get('name') or 'the network'}, tier {tier['name']}")
        below *= int(tier["size"])
    return None
