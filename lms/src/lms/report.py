"""A report of a trace, a plan and a measured pass: one self-contained HTML page, and the table of limits as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from lms.core.plan import Plan, table
from lms.core.timeline import Span, Timeline
from lms.core.trace import Trace
from lms.drawing import svg
from lms.errors import UsageError
from lms.link import Link
from lms.link.table import columns
from lms.link.watch import Watched
from lms.picture import Picture, draw, managed_curve, plain_curve
from lms.stats import format_seconds
from lms.units import format_size

if TYPE_CHECKING:
    from jinja2 import Template

_ANY_LINK = Link("any", 1e9, 1e9)  # for figures that no link changes, such as the floor


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


@dataclass(frozen=True)
class Limits:
    """The limits to choose from, and their costs. Sizes in bytes; 0: not measured."""

    floor: int
    floor_module: str
    plain_peak: int  # of the recorded pass with nothing swapped, in LMS's page pool; an evaluation is not in it
    rows: tuple[LimitRow, ...]


def limits_of(trace: Trace, link: Link) -> Limits:
    """Floor, the peak with nothing swapped, and a row for each share of the saved bytes that may stay."""
    plans = table(trace, link)
    plain = trace.step_seconds(trace.seconds)
    seconds = [trace.step_seconds(plan.forecast.seconds) for plan in plans]
    return Limits(
        floor=plans[-1].floor,
        floor_module=plans[-1].floor_module,
        plain_peak=plans[-1].plain_peak,
        rows=tuple(
            LimitRow(
                share=plan.budget / trace.saved if trace.saved else 1.0,
                budget=plan.budget,
                limit=plan.limit,
                held_peak=plan.forecast.held_peak,
                peak=plan.forecast.resident_peak or None,
                moved=plan.forecast.out,
                seconds=predicted,
                slowdown=predicted / plain if plain else 1.0,
            )
            for plan, predicted in zip(plans, seconds, strict=True)
        ),
    )


def limits_text(trace: Trace, link: Link, limits: Limits) -> str:
    """The answer as text: a few lines, and a table."""
    whole = limits.plain_peak > 0
    facts = [
        ("saved", f"{format_size(trace.saved)} for the backward pass, in {len(trace.records)} records"),
        *([("unswapped", f"{format_size(limits.plain_peak)}{_unlike_plain(trace)}")] if whole else []),
        *([("floor", f"{format_size(limits.floor)}, {limits.floor_module}: no limit can be lower")] if whole else []),
        *cycle_facts(trace),
        ("link", f"{format_size(link.out)}/s out, {format_size(link.back)}/s back ({link.source or link.name})"),
    ]
    head = [
        "may stay",
        "budget",
        *(["limit"] if whole else []),
        "peak" if whole else "held",
        "moved out",
        "step" if trace.cycle else "pass",
    ]
    lines = [[*head, "x plain"]]
    for row in limits.rows:
        lines.append(
            [
                f"{row.share:.0%}",
                format_size(row.budget),
                *([format_size(row.limit or 0)] if whole else []),
                format_size(row.peak or row.held_peak),
                format_size(row.moved),
                format_seconds(row.seconds),
                f"{row.slowdown:.2f}",
            ]
        )
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


def _unlike_plain(trace: Trace) -> str:
    """Why the peak with nothing swapped is not that of the script without LMS."""
    pool = "; without LMS's page pool it is higher" if trace.device == "cpu" else ""
    return f", the peak of forward and backward with nothing swapped{pool}"


def limit_document(trace: Trace, link: Link, limits: Limits) -> dict[str, object]:
    """The document that `--json` writes. Sizes in bytes, times in seconds; null: not measured."""
    return {
        "format": "lms-limits-1",
        "floor": limits.floor or None,
        "floor_module": limits.floor_module or None,
        "plain_peak": limits.plain_peak or None,
        "saved": trace.saved,
        "largest": trace.largest,
        "seconds": trace.seconds,
        "cycle": trace.cycle or None,
        "busy": trace.busy if trace.cycle else None,
        "passes": trace.passes if trace.cycle else None,
        "link": link.to_dict(),
        "device": trace.device,
        "capacity": trace.capacity or None,
        "limits": [asdict(row) for row in limits.rows],
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
    return Picture(
        title=title or "Memory over one step",
        curves=tuple(curves),
        spans=spans,
        limit=None if plan is None else (limit or plan.limit) if whole else plan.budget,
        limit_label="limit" if whole else "budget",
        floor=plan.floor if plan is not None and whole else None,
        memory_label=(
            f"memory of the {'process' if trace.device == 'cpu' else 'device'}"
            if whole
            else "saved bytes on the device"
        ),
    )


def render(
    trace: Trace,
    *,
    link: Link | None = None,
    plan: Plan | None = None,
    ran: Timeline | None = None,
    stats: Mapping[str, float | int | None] | None = None,
    watched: Watched | None = None,
    unwatched: str = "",
    title: str = "One training step",
) -> str:
    """The page, as one self-contained HTML document; without a link it says nothing of times to come.

    `watched` is what the machine counted while the session ran; `unwatched` says why it counted nothing.

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
        rows=limits_of(trace, link).rows if link else (),
        **page.facts(trace, link, watched, stats, unwatched),
        modules=_modules(trace, plan),
        gone=plan.moved() if plan else (),
        stats=stats,
        machine={"device": trace.device, **dict(trace.machine)},
    )


def template(name: str) -> Template:
    """A template of `templates/`. Raises UsageError when jinja2 is not installed."""
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError:
        raise UsageError("a report needs jinja2, which is not installed: pip install 'bascule-lms[report]'") from None
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
    lowest = plan or table(trace, _ANY_LINK, shares=(0.0,))[0]
    if lowest.plain_peak:
        said.append((format_size(lowest.plain_peak), "peak with nothing swapped", "recorded"))
        said.append((format_size(lowest.floor), f"floor: {lowest.floor_module}", "no limit can be lower"))
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
        ratio = (seconds or plan.forecast.seconds) / trace.seconds if trace.seconds else 1.0
        shown = f"{format_seconds(seconds or plan.forecast.seconds)} ({ratio:.2f} x)"
        said.append((shown, "pass, over its computation alone", "measured" if seconds else "predicted"))
    else:
        said.append((format_seconds(trace.seconds), "computation of one pass", "recorded"))
    if trace.cycle:
        said.append((format_seconds(trace.cycle), "from step to step, LMS left out", "recorded"))
        said.append((f"{trace.busy / trace.cycle:.0%}", "of it the device computed", "recorded"))
    return said


def _modules(trace: Trace, plan: Plan | None) -> list[dict[str, object]]:
    """Totals for each module, the one that saved most first."""
    gone = plan.moved() if plan else frozenset()
    totals: dict[str, list[int]] = {}
    for index, record in enumerate(trace.records):
        total = totals.setdefault(record.module, [0, 0, 0])
        total[0] += 1
        total[1] += record.nbytes
        total[2] += record.nbytes if index in gone else 0
    ordered = sorted(totals.items(), key=lambda item: (-item[1][1], item[0]))
    return [
        {
            "name": name or "(no module)",
            "records": count,
            "saved": saved,
            "goes": goes,
            "share": saved / trace.saved if trace.saved else 0.0,
        }
        for name, (count, saved, goes) in ordered
    ]
