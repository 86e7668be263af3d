"""Which targets were reached. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from scenarios import LARGE, Target
from shaped import Run

from ddl.bench.contest import Turns
from ddl.bench.contestants import DDL, FLAT
from ddl.bench.figures import ratios, spread
from ddl.planning import interface, network
from ddl.planning.units import format_size

MARGIN = 0.05  # of small messages, beyond the best peer's own spread


@dataclass(frozen=True)
class Verdict:
    """A target and what came out; `reached` None: nothing to judge it by was there."""

    what: str
    value: float | None
    target: str
    reached: bool | None


def turns_of(record: dict[str, object]) -> list[Turns]:
    """The turns in a record of `ddlrun bench --json`."""
    entries = record["turns"]
    assert isinstance(entries, list)
    return [Turns(one["contestant"], one["bytes"], one["repeats"], dict(enumerate(one["seconds"]))) for one in entries]


def judge(run: Run) -> list[Verdict]:
    """The verdict on each of a scenario's targets."""
    by_order: dict[tuple[int, ...], list[Turns]] = {}
    for order, record in run.records:
        by_order.setdefault(order, []).extend(turns_of(record))
    return [_judge(run, by_order, target) for target in run.scenario.targets]


def _judge(run: Run, by_order: dict[tuple[int, ...], list[Turns]], target: Target) -> Verdict:
    turns = next(iter(by_order.values()))
    if target.figure == "order":
        return _order(by_order, target)
    size = int(target.value) if target.figure == "small" else LARGE
    here = [one for one in turns if one.size == size]
    ours = next(one for one in here if one.name == DDL)
    if target.figure == "bound":
        assert run.network is not None
        bound = interface.bounds(network.from_dict(run.network).tree, size).cut
        value = ours.median / bound
        return Verdict(f"{format_size(size)}: time over the bound", value, f"<= {target.value}", value <= target.value)
    peers = [one for one in here if one.name.startswith(target.about) and one.name not in (DDL, FLAT)]
    best = min(peers, key=lambda one: one.median, default=None)
    if best is None:
        return Verdict(f"{format_size(size)}: {target.about or 'the best peer'}", None, "", None)
    value = median(ratios(best, ours))
    what = f"{format_size(size)}: time of {best.name} over ours"
    if target.figure == "small":
        least = 1 - MARGIN - spread(best)
        return Verdict(what, value, f">= {least:.2f} (its own spread is {spread(best):.0%})", value >= least)
    return Verdict(what, value, f">= {target.value}", value >= target.value)


def _order(by_order: dict[tuple[int, ...], list[Turns]], target: Target) -> Verdict:
    best, *others = [median(one.median for one in turns if one.size == LARGE) for turns in by_order.values()]
    value = max(others) / best
    what = f"{format_size(LARGE)}: time with hosts in the worst order over the best"
    return Verdict(what, value, f"<= {target.value}", value <= target.value)


def lines(verdicts: Sequence[Verdict]) -> list[str]:
    """One line for each."""
    words = {True: "reached", False: "MISSED", None: "not judged"}
    return [
        f"{words[one.reached]:<10} {one.what}: "
        + ("the peer is not installed" if one.value is None else f"{one.value:.3f}, target {one.target}")
        for one in verdicts
    ]
