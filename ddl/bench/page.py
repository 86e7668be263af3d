"""The tables of a results page, in Markdown. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from runs import Run, Verdict
from scenarios import Allreduce
from verdicts import by_order, judge, left_out_of, turns_of

from ddl.bench.contest import Turns
from ddl.bench.contestants import DDL
from ddl.bench.figures import Bound, ratios, words
from ddl.planning.units import format_size, format_time

_WORDS = {True: "reached", False: "**missed**", None: "not judged"}


def page(runs: Sequence[Run[Allreduce]]) -> str:
    """A section for each scenario: links, targets, times and ratios to DDL's time."""
    return "\n\n".join("\n\n".join(_section(run)) for run in runs) + "\n"


def _section(run: Run[Allreduce]) -> list[str]:
    said = [f"## {run.scenario.title[0].upper()}{run.scenario.title[1:]}"]
    if run.before is not None and run.after is not None:
        links = f"Links of {run.scenario.link}" + (f", uplinks of {run.scenario.uplink}" if run.before.uplink else "")
        said.append(f"{links}; {run.before} before, {run.after} after.")
    if verdicts := judge(run):
        said.append(_verdicts(verdicts))
    if len(run.records) == 1:
        (record,) = run.records
        said.append(_times(turns_of(record), run.bound if run.before else None))
        said += [f"{words(one)}." for one in left_out_of(record)]
    else:
        said.append(_orders(run))
    return said


def _verdicts(verdicts: Sequence[Verdict]) -> str:
    rows = [
        (one.what, "" if one.value is None else f"{one.value:.3f}", one.target, one.why or _WORDS[one.reached])
        for one in verdicts
    ]
    return table(("target", "figure", "aim", ""), rows)


def _times(turns: Sequence[Turns], bound: Bound | None) -> str:
    """DDL's time and share of the bound, and the others' time over DDL's; only the best setting of a family."""
    settings = {one.name for one in turns if one.family}
    plain = [name for name in dict.fromkeys(one.name for one in turns) if name != DDL and name not in settings]
    head = ["size", DDL, *(["of the bound"] if bound else []), *plain, *(["best setting"] if settings else [])]
    rows = []
    for size in dict.fromkeys(one.size for one in turns):
        here = {one.name: one for one in turns if one.size == size}
        ours = here[DDL]
        row = [format_size(size), format_time(ours.median)]
        row += [f"{bound(size) / ours.median:.0%}"] if bound else []
        row += [_ratio(here.get(name), ours) for name in plain]
        best = min((here[name] for name in settings if name in here), key=lambda one: one.median, default=None)
        row += [f"{_ratio(best, ours)}" + (f" ({best.name})" if best else "")] if settings else []
        rows.append(row)
    return table(head, rows)


def _ratio(other: Turns | None, ours: Turns) -> str:
    return "" if other is None else f"{median(ratios(other, ours)):.2f}"


def _orders(run: Run[Allreduce]) -> str:
    rows = [
        (" ".join(map(str, order)), ", ".join(format_time(one.median) for one in turns))
        for order, turns in by_order(run).items()
    ]
    return table(("order of hosts", f"time of {run.scenario.sizes}, a run each"), rows)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
