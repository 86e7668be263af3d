"""A report of a trace, a plan and a measured pass: one self-contained HTML page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from lms.advice import advice
from lms.core.plan import Plan, floor, plain_peak, step_peak
from lms.core.timeline import Span, Timeline
from lms.core.trace import Trace
from lms.drawing import svg
from lms.errors import UsageError
from lms.limits import limits_of
from lms.link import Link
from lms.link.watch import Watched
from lms.picture import Picture, draw, managed_curve, plain_curve
from lms.stats import Stats, format_seconds
from lms.units import format_size

if TYPE_CHECKING:
    from jinja2 import Template


def picture_of(
    trace: Trace, plan: Plan | None = None, ran: Timeline | None = None, *, limit: int | None = None
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
        title="Memory over one step",
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
        elif foreseen := step_peak(trace, plan):
            said.append((format_size(foreseen), "peak with LMS", "predicted"))
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
