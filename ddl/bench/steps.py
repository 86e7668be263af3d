"""The figures of training steps. Pure.

- compute: the step under `no_sync`, on the slowest rank; the median over rounds
- communication: the step minus the same step under `no_sync` in the same round, each on the slowest rank; the median
  over rounds. Communication that the backward pass hides does not count.
- ratio: the other's communication over DDL's in the same round; the median over rounds
- bound: the least time that any algorithm needs for all gradients in one allreduce, over all cuts of the network
- floor: the larger of compute and bound. No step is faster, and with DistributedDataParallel none is as fast: the
  forward pass has no gradients yet, and the optimizer waits for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from runs import Verdict, at_least, at_most

from ddl.planning.units import format_time

DDL, GLOO, ALONE = "ddl", "gloo", "no_sync"
COMMUNICATION = 1.4  # gloo's over ours, at least
OVER_FLOOR = 1.15  # our step over the floor, at most
APART = 1e-4  # relative difference of losses that is allowed: additions in another order, through a few steps


@dataclass(frozen=True)
class Steps:
    """The results of a contestant's steps."""

    name: str
    losses: list[float]  # the mean over all ranks, in the steps before the timing
    same_bits: bool  # of the parameters after those steps, on all ranks; not for ALONE
    buckets: list[int]  # bytes of DistributedDataParallel's buckets, in order
    seconds: list[float]  # of each round's step, on the slowest rank


@dataclass(frozen=True)
class Row:
    """A contestant's figures, in seconds; `ratio` None if there is no communication to compare."""

    name: str
    step: float
    communication: float
    ratio: float | None
    over_floor: float


def steps_of(record: Mapping[str, Any]) -> dict[str, Steps]:
    """The contestants of a trainee's record, by name."""
    return {one["name"]: Steps(**one) for one in record["steps"]}


def rows(steps: Mapping[str, Steps], bound: float) -> list[Row]:
    """The figures of all but ALONE; `bound` is in seconds, 0 if there is none."""
    alone = steps[ALONE].seconds
    ours = [its - base for its, base in zip(steps[DDL].seconds, alone, strict=True)]
    found = []
    for one in steps.values():
        if one.name == ALONE:
            continue
        theirs = [its - base for its, base in zip(one.seconds, alone, strict=True)]
        # If communication is not larger than a step's noise, a ratio would mean nothing.
        visible = min(median(ours), median(theirs)) > 0.1 * median(alone) and min(ours) > 0
        over = median(its / max(base, bound) for its, base in zip(one.seconds, alone, strict=True))
        ratio = median(its / base for its, base in zip(theirs, ours, strict=True)) if visible else None
        found.append(Row(one.name, median(one.seconds), median(theirs), ratio, over))
    return found


def faults(steps: Mapping[str, Steps]) -> list[str]:
    """Faults of the training itself: a contestant that computes something else must not be timed."""
    found = []
    ours = steps[DDL].losses
    for one in steps.values():
        if one.name == ALONE:
            if abs(one.losses[0] - ours[0]) > APART * abs(ours[0]):
                found.append(f"{one.name}: the first loss is {one.losses[0]!r}, and {DDL}'s {ours[0]!r}")
            continue
        apart = [abs(its - base) / abs(base) for its, base in zip(one.losses, ours, strict=True)]
        if not all(value <= APART for value in apart):  # also catches NaN
            found.append(f"{one.name}: losses {one.losses}, and {DDL}'s {ours}: {max(apart):.1e} apart")
        if not one.same_bits:
            found.append(f"{one.name}: the ranks' parameters have different bits after {len(one.losses)} steps")
        if not one.losses[-1] < one.losses[0]:
            found.append(f"{one.name}: it learns nothing, its losses are {one.losses}")
    return found


def table(steps: Mapping[str, Steps], bound: float) -> str:
    """A line for each contestant, and one for the step without communication."""
    width = max(len(name) for name in steps)
    lines = [f"{'':<{width}}  {'step':>10}  {'communication':>13}  {'x ddl':>6}" + ("  step/floor" if bound else "")]
    for row in sorted(rows(steps, bound), key=lambda row: row.step):
        line = f"{row.name:<{width}}  {format_time(row.step):>10}  {_signed(row.communication):>13}"
        line += f"  {'' if row.ratio is None else format(row.ratio, '.2f'):>6}"
        lines.append(line + (f"  {row.over_floor:>10.3f}" if bound else ""))
    lines.append(f"{ALONE:<{width}}  {format_time(median(steps[ALONE].seconds)):>10}")
    return "\n".join(line.rstrip() for line in lines)


def judge(steps: Mapping[str, Steps], bound: float) -> list[Verdict]:
    """The verdicts on the training steps of a virtual cluster; `bound` is in seconds."""
    by_name = {row.name: row for row in rows(steps, bound)}
    what = "communication of gloo over ours"
    ratio = by_name[GLOO].ratio if GLOO in by_name else None
    return [
        Verdict(what, None, "", None, "there is none to be seen")
        if ratio is None
        else at_least(what, ratio, COMMUNICATION),
        at_most("step over the larger of compute and bound", by_name[DDL].over_floor, OVER_FLOOR),
    ]


def _signed(seconds: float) -> str:
    return f"-{format_time(-seconds)}" if seconds < 0 else format_time(seconds)
