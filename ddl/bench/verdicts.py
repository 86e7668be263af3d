"""Verdicts: which targets were reached. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from runs import Run
from scenarios import LARGE, Target
from steps import DDL as OURS
from steps import GLOO, Steps, rows

from ddl.bench.contest import LeftOut, Turns
from ddl.bench.contestants import DDL, FLAT
from ddl.bench.figures import ratios, spread
from ddl.planning import interface, network
from ddl.planning.units import format_size

MARGIN = 0.05  # for small messages, beyond the best peer's own spread
COMMUNICATION, OVER_FLOOR = (
    1.4,
    1.15,
)  # of a step: gloo's over ours, at least; step over floor, at most
NOISE = 0.10  # a larger spread is the machine's noise, and proves nothing


@dataclass(frozen=True)
class Verdict:
    """A target and the result; `reached` is None if it could not be judged, or only by noise (`why`)."""

    what: str
    value: float | None
    target: str
    reached: bool | None
    why: str = ""


def turns_of(record: dict[str, object]) -> list[Turns]:
    """The turns in a record of `ddlrun bench --json`."""
    entries = record["turns"]
    assert isinstance(entries, list)
    return [
        Turns(one["contestant"], one["bytes"], one["repeats"], dict(enumerate(one["seconds"])), one.get("family", ""))
        for one in entries
    ]


def left_out_of(record: dict[str, object]) -> list[LeftOut]:
    """The contestants that were left out, in a record of `ddlrun bench --json`."""
    entries = record.get("left_out", [])  # older records have none
    assert isinstance(entries, list)
    return [LeftOut(**one) for one in entries]


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
        what = f"{format_size(size)}: {target.about or 'the best peer'}"
        return Verdict(what, None, "", None, "the peer is not installed, or was left out")
    value = median(ratios(best, ours))
    what = f"{format_size(size)}: time of {best.name} over ours"
    if target.figure == "small":
        return _small(what, value, spread(best))
    return Verdict(what, value, f">= {target.value}", value >= target.value)


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


def _order(by_order: dict[tuple[int, ...], list[Turns]], target: Target) -> Verdict:
    best, *others = [median(one.median for one in turns if one.size == LARGE) for turns in by_order.values()]
    value = max(others) / best
    what = f"{format_size(LARGE)}: time with hosts in the worst order over the best"
    return Verdict(what, value, f"<= {target.value}", value <= target.value)


def judge_steps(steps: Mapping[str, Steps], bound: float) -> list[Verdict]:
    """The verdicts on the training steps of a virtual cluster; `bound` is in seconds."""
    by_name = {row.name: row for row in rows(steps, bound)}
    what = "communication of gloo over ours"
    ratio = by_name[GLOO].ratio if GLOO in by_name else None
    over = by_name[OURS].over_floor
    return [
        Verdict(what, None, "", None, "there is none to be seen")
        if ratio is None
        else Verdict(what, ratio, f">= {COMMUNICATION}", ratio >= COMMUNICATION),
        Verdict("step over the larger of compute and bound", over, f"<= {OVER_FLOOR}", over <= OVER_FLOOR),
    ]


def lines(verdicts: Sequence[Verdict]) -> list[str]:
    """A line for each verdict."""
    words = {True: "reached", False: "MISSED", None: "not judged"}
    said = []
    for one in verdicts:
        parts = [] if one.value is None else [f"{one.value:.3f}"]
        parts += [f"target {one.target}"] if one.target else []
        parts += [one.why] if one.why else []
        said.append(f"{words[one.reached]:<10} {one.what}: {', '.join(parts)}")
    return said
