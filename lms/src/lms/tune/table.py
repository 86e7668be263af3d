"""What a search found, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from lms.stats import format_seconds
from lms.tune.study import OUTCOME, counted
from lms.units import plural

MOST_ROWS = 20


def best_first(trials: Sequence[FrozenTrial], direction: StudyDirection) -> list[FrozenTrial]:
    """The trials that have a result, the best first; those without a value come last."""
    sign = -1 if direction == StudyDirection.MAXIMIZE else 1

    def order(trial: FrozenTrial) -> tuple[bool, float, int]:
        complete = trial.state == TrialState.COMPLETE
        return not complete, sign * (trial.value or 0.0) if complete else 0.0, trial.number

    return sorted((one for one in counted(trials) if one.state.is_finished()), key=order)


def best(trials: Sequence[FrozenTrial], direction: StudyDirection) -> FrozenTrial | None:
    """The trial with the best value; None if none has one."""
    first = next(iter(best_first(trials, direction)), None)
    return first if first is not None and first.state == TrialState.COMPLETE else None


def text(trials: Sequence[FrozenTrial], direction: StudyDirection, metric: str) -> str:
    """A table of the results, the best first, and how many of them have a value."""
    ranked = best_first(trials, direction)
    names = list(dict.fromkeys(name for one in ranked for name in one.params))
    rows = [["trial", metric, "time", *names, ""]]
    for one in ranked[:MOST_ROWS]:
        complete = one.state == TrialState.COMPLETE
        value = f"{one.value:.6g}" if complete else "-"
        took = format_seconds(one.duration.total_seconds()) if one.duration is not None else "-"
        note = "" if complete else one.user_attrs.get(OUTCOME, "pruned")
        rows.append([str(one.number), value, took, *(shown(one.params.get(name, "-")) for name in names), str(note)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)) for row in rows]
    lines = [f"{line}  {row[-1]}".rstrip() for line, row in zip(lines, rows, strict=True)]
    if len(ranked) > MOST_ROWS:
        lines.append(f"and {len(ranked) - MOST_ROWS} more")
    valued = sum(one.state == TrialState.COMPLETE for one in ranked)
    return "\n".join([*lines, "", f"{plural(len(ranked), 'trial')}, {valued} with a value"])


def shown(value: object) -> str:
    """A parameter's value for a person."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def settings(params: Mapping[str, object]) -> str:
    """Parameters in one line for a person."""
    return ", ".join(f"{name}={shown(value)}" for name, value in params.items())
