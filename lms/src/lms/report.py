"""A report of a trace, a plan and a measured pass: one self-contained HTML page, and the table of limits as text."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from lms.advice import advice
from lms.core.plan import Plan, floor, plain_peak, table
from lms.core.timeline import Span, Timeline
from lms.core.trace import Trace
from lms.drawing import svg
from lms.errors import UsageError
from lms.link import Link
from lms.link.table import columns
from lms.link.watch import Watched
from lms.picture import Picture, draw, managed_curve, plain_curve
from lms.stats import Stats, format_seconds
from lms.units import format_size

if TYPE_CHECKING:
    from jinja2 import Template


@dataclass(frozen=True)
class LimitRow:
    """The cost of keeping one share of the saved bytes on the device. Sizes in bytes, times in seconds."""

    share: float  # of the saved bytes, that may stay
    budget: int
    limit: int | None  # what to ask for; None when the trace did not measure the rest of the device
    held_peak: int
    peak: int | None  # predicted, on the device, everything included; None as above
    moved: int  # bytes out, and nearly as many back
    seconds: float  # predicted: the whole step if the trace has its cycle, else the pass
    slowdown: float  # over the same with nothing swapped


def limits_of(trace: Trace, link: Link) -> list[LimitRow]:
    """A row for each of some shares of the saved bytes that may stay."""
    plain = trace.step_seconds(trace.seconds)
    rows = []
    for plan in table(trace, link):
        seconds = trace.step_seconds(plan.forecast.seconds)
        rows.append(
            LimitRow(
                share=plan.budget / trace.saved if trace.saved else 1.0,
                budget=plan.budget,
                limit=plan.limit,
                held_peak=plan.forecast.held_peak,
                peak=plan.forecast.resident_peak or None,
                moved=plan.forecast.out,
                seconds=seconds,
                slowdown=seconds / plain if plain else 1.0,
            )
        )
    return rows


def limits_text(trace: Trace, link: Link, rows: Sequence[LimitRow]) -> str:
    """The answer as text: a few lines, and a table."""
    lowest, where = floor(trace)
    # The peak is the recorded pass's, in LMS's page pool. An evaluation is not in it.
    plain = f"{format_size(plain_peak(trace))}, the peak of forward and backward with nothing swapped"
    pool = "; without LMS's page pool it is higher" if trace.device == "cpu" else ""
    facts = [
        ("saved", f"{format_size(trace.saved)} for the backward pass, in {len(trace.records)} records"),
        *([("unswapped", plain + pool)] if lowest else []),
        *([("floor", f"{format_size(lowest)}, {where}: no limit can be lower")] if lowest else []),
        *cycle_facts(trace),
        ("link", f"{format_size(link.out)}/s out, {format_size(link.back)}/s back ({link.source or link.name})"),
    ]
    known = ["budget", "limit", "peak"] if lowest else ["budget", "held"]
    lines = [["may stay", *known, "moved out", "step" if trace.cycle else "pass", "x plain"]]
    for row in rows:
        sizes = [row.budget, row.limit or 0, row.peak or 0] if lowest else [row.budget, row.held_peak]
        times = [format_seconds(row.seconds), f"{row.slowdown:.2f}"]
        lines.append([f"{row.share:.0%}", *map(format_size, [*sizes, row.moved]), *times])
    return "\n".join([*(f"{name:<10}  {text}" for name, text in facts), "", *columns(lines, 0)])


def cycle_facts(trace: Trace) -> list[tuple[str, str]]:
    """The recorded times as (name, text): the pass and, if it was measured, the step around it."""
    if not trace.cycle:
        return [("pass", f"{format_seconds(trace.seconds)} of computation; the step around it was not measured")]
    passes = f" in each of {trace.passes:.3g} passes a step" if round(trace.passes, 1) != 1 else ""
    return [
        ("pass", f"{format_seconds(trace.seconds)} of computation{passes}"),
        (
            "step",
            f"{format_seconds(trace.cycle)} from one optimizer step to the next; the device computed for "
            f"{format_seconds(trace.busy)} of it ({trace.busy / trace.cycle:.0%})",
        ),
    ]


def limit_document(trace: Trace, link: Link, rows: Sequence[LimitRow]) -> dict[str, object]:
    """The document that `--json` writes. Sizes in bytes, times in seconds; null: not measured."""
    lowest, where = floor(trace)
    return {
        "format": "lms-limits-1",
        "floor": lowest or None,
        "floor_module": where or None,
        "plain_peak": plain_peak(trace) or None,
        "saved": trace.saved,
        "largest": trace.largest,
        "seconds": trace.seconds,
        "cycle": trace.cycle or None,
        "busy": trace.busy if trace.cycle else None,
        "passes": trace.passes if trace.cycle else None,
        "link": link.to_dict(),
        "device": trace.device,
        "capacity": trace.capacity or None,
        "limits": [asdict(row) for row in rows],
        "machine": dict(trace.machine),
    }


def picture_of(
    trace: Trace, plan: Plan | None = None, ran: Timeline | None = None, *, limit: int | None = None, title: str = ""
) -> Picture:
    """Memory over one step: plain, and LMS as it `ran` or else as `plan` foresees it.

    Draws the whole device if the trace measured it and a limit bounds it; otherwise the saved bytes and their budget.
    `limit` is what the user asked for; the plan may have been made for a little less. None takes the plan's.
    """
    whole = trace.measured and (plan is None or plan.limit is not None)
    curves = [plain_curve(trace, whole=whole, label="plain")]
    spans: tuple[Span, ...] = ()
    if ran is not None:
        spans = ran.spans
        curves.append(managed_curve(trace, ran, whole=whole, label="LMS, measured"))
    elif plan is not None:
        spans = plan.forecast.spans
        curve = managed_curve(trace, Timeline(spans, plan.forecast.held), whole=whole, label="LMS, predicted")
        curves.append(replace(curve, peak=plan.forecast.resident_peak if whole else plan.forecast.held_peak))
    held_by = "process" if trace.device == "cpu" else "device"
    return Picture(
        title=title or "Memory over one step",
        curves=tuple(curves),
        spans=spans,
        limit=None if plan is None else (limit or plan.limit) if whole else plan.budget,
        limit_label="limit" if whole else "budget",
        floor=plan.floor if plan is not None and whole else None,
        memory_label=f"memory of the {held_by}" if whole else "saved bytes on the device",
    )


def render(
    trace: Trace,
    *,
    link: Link | None = None,
    plan: Plan | None = None,
    ran: Timeline | None = None,
    stats: Mapping[str, float | int | None] | None = None,
    watched: Watched | str | None = None,
    title: str = "One training step",
) -> str:
    """The page, as one self-contained HTML document; without a link it says nothing of times to come.

    `watched` is what the machine counted while the session ran, or why it counted nothing.

    Raises UsageError when jinja2 or matplotlib is not installed.
    """
    from lms.link import page

    return template("step.html").render(
        title=title,
        trace=trace,
        link=link,
        plan=plan,
        headline=_headline(trace, plan, stats),
        svg=svg(draw(picture_of(trace, plan, ran, limit=int((stats or {}).get("limit") or 0) or None))),
        rows=limits_of(trace, link) if link else (),
        **page.facts(trace, link, watched, stats),
        modules=_modules(trace, plan),
        gone=plan.moved() if plan else (),
        stats=stats,
        advice=advice(Stats(**stats)) if stats else (),  # type: ignore[arg-type]  # the keys of the dict are the fields
        machine={"device": trace.device, **dict(trace.machine)},
    )


def template(name: str) -> Template:
    """A template of `templates/`. Raises UsageError when jinja2 is not installed."""
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError:
        raise UsageError(
            "a report needs jinja2, which is not installed: pip install './lms[report]' in a copy of the repository"
        ) from None
    from lms.link.page import headroom_text

    environment = Environment(
        loader=PackageLoader("lms"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"size": format_size, "time": format_seconds, "times": headroom_text}
    return environment.get_template(name)


def _headline(
    trace: Trace, plan: Plan | None, stats: Mapping[str, float | int | None] | None
) -> list[tuple[str, str, str]]:
    """The figures to read first, as (figure, name, origin)."""
    said: list[tuple[str, str, str]] = [(format_size(trace.saved), "saved for the backward pass", "recorded")]
    lowest, where = floor(trace)
    if lowest:
        said.append((format_size(plain_peak(trace)), "peak with nothing swapped", "recorded"))
        said.append((format_size(lowest), f"floor: {where}", "no limit can be lower"))
    if plan is not None:
        limit = (stats or {}).get("limit") or plan.limit
        if limit is not None:
            said.append((format_size(limit), "limit", "asked for"))
        else:
            said.append((format_size(plan.budget), "budget of saved bytes", "asked for"))
        peak = stats.get("peak") if stats else None
        if peak:
            said.append((format_size(peak), "peak with LMS", "measured, all steps"))
        elif plan.forecast.resident_peak:
            said.append((format_size(plan.forecast.resident_peak), "peak with LMS", "predicted"))
        said.append((format_size(plan.forecast.held_peak), "saved bytes held at most", "predicted"))
        moved = f"{format_size(plan.forecast.out)} / {format_size(plan.forecast.back)}"
        said.append((moved, "out / back in a pass", "planned"))
        seconds = (stats.get("last_seconds") if stats else None) or None
        took = seconds or plan.forecast.seconds
        shown = f"{format_seconds(took)} ({trace.slowdown(took):.2f} x)"
        said.append((shown, "pass, over its computation alone", "measured" if seconds else "predicted"))
    else:
        said.append((format_seconds(trace.seconds), "computation of one pass", "recorded"))
    if trace.cycle:
        said.append((format_seconds(trace.cycle), "from step to step, LMS left out", "recorded"))
        said.append((f"{trace.busy / trace.cycle:.0%}", "of it the device computed", "recorded"))
    return said


def _modules(trace: Trace, plan: Plan | None) -> list[tuple[str, int, int, int]]:
    """For each module its name, records, their bytes, and those of them that go. The one that saved most first."""
    gone = plan.moved() if plan else frozenset()
    sizes: defaultdict[str, list[tuple[int, bool]]] = defaultdict(list)
    for index, record in enumerate(trace.records):
        sizes[record.module].append((record.nbytes, index in gone))
    modules = [
        (name or "(no module)", len(found), sum(size for size, _ in found), sum(size for size, goes in found if goes))
        for name, found in sizes.items()
    ]
    return sorted(modules, key=lambda module: (-module[2], module[0]))
