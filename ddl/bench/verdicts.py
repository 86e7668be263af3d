"""Verdicts on allreduces: which targets were reached. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from runs import Run, Verdict, at_least, at_most
from scenarios import LARGE, Allreduce, Target

from ddl.bench.contest import LeftOut, Turns
from ddl.bench.contestants import DDL
from ddl.bench.figures import ratios, spread
from ddl.planning.units import format_size

MARGIN = 0.05  # for small messages, beyond the best peer's own spread
NOISE = 0.10  # a larger spread is the machine's noise, and proves nothing


def turns_of(record: Mapping[str, Any]) -> list[Turns]:
    """The turns in a record of `ddlrun bench --json`."""
    return [
        Turns(one["contestant"], one["bytes"], one["repeats"], dict(enumerate(one["seconds"])), one.get("family", ""))
        for one in record["turns"]
    ]


def left_out_of(record: Mapping[str, Any]) -> list[LeftOut]:
    """The contestants that were left out, in a record of `ddlrun bench --json`."""
    return [LeftOut(**one) for one in record.get("left_out", [])]  # older records have none


def by_order(run: Run[Allreduce]) -> dict[tuple[int, ...], list[Turns]]:
    """The turns of a run's records, by the order of hosts that each was given."""
    found: dict[tuple[int, ...], list[Turns]] = {}
    for record in run.records:
        found.setdefault(tuple(record["order"]), []).extend(turns_of(record))
    return found


def judge(run: Run[Allreduce]) -> list[Verdict]:
    """The verdict on each of a scenario's targets whose size was measured."""
    orders = by_order(run)
    sizes = {one.size for turns in orders.values() for one in turns}
    return [_judge(run, orders, target) for target in run.scenario.targets if _size(target) in sizes]


def _size(target: Target) -> int:
    return int(target.value) if target.figure == "small" else LARGE


def _judge(run: Run[Allreduce], by_order: Mapping[tuple[int, ...], list[Turns]], target: Target) -> Verdict:
    turns = next(iter(by_order.values()))
    if target.figure == "order":
        return _order(by_order, target)
    size = _size(target)
    here = [one for one in turns if one.size == size]
    ours = next(one for one in here if one.name == DDL)
    if target.figure == "bound":
        return at_most(f"{format_size(size)}: time over the bound", ours.median / run.bound(size), target.value)
    peers = [one for one in here if one.name.startswith(target.about) and not one.name.startswith(DDL)]
    best = min(peers, key=lambda one: one.median, default=None)
    if best is None:
        what = f"{format_size(size)}: {target.about or 'the best peer'}"
        return Verdict(what, None, "", None, "the peer is not installed, or was left out")
    value = median(ratios(best, ours))
    what = f"{format_size(size)}: time of {best.name} over ours"
    if target.figure == "small":
        return _small(what, value, spread(best))
    return at_least(what, value, target.value)


def _small(what: str, value: float, apart: float | None) -> Verdict:
    """A small message must not be slower by more than MARGIN plus `apart`, the best peer's own spread.

    Noise is no excuse: if the spread is larger than NOISE, a time within it is not judged.
    """
    if apart is None:
        return Verdict(what, value, "", None, "one round says nothing about the peer's own spread")
    least = 1 - MARGIN - apart
    target = f">= {least:.2f} (its own spread is {apart:.0%})"
    if apart > NOISE and value >= least:
        return Verdict(what, value, target, None, "noise")
    return Verdict(what, value, target, value >= least)


def _order(by_order: Mapping[tuple[int, ...], list[Turns]], target: Target) -> Verdict:
    best, *others = [median(one.median for one in turns if one.size == LARGE) for turns in by_order.values()]
    what = f"{format_size(LARGE)}: time with hosts in the worst order over the best"
    return at_most(what, max(others) / best, target.value)
