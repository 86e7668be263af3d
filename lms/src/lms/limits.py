"""What each limit would cost a recorded step: as rows, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from lms.core.budget import Budget
from lms.core.link import Link
from lms.core.plan import first_peak, floor, plain_peak, step_peak, table
from lms.core.trace import Trace
from lms.link.table import columns
from lms.stats import format_seconds
from lms.units import format_size


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
                peak=step_peak(trace, plan) or None,
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
        ("saved", f"{format_size(trace.saved)} for the backward pass, in {trace.movable} records"),
        *([("unswapped", plain + pool)] if lowest else []),
        *([("floor", f"{format_size(lowest)}, {where}: no limit can be lower")] if lowest else []),
        *_first_facts(trace, rows),
        *_cycle_facts(trace),
        ("link", f"{format_size(link.out)}/s out, {format_size(link.back)}/s back ({link.source or link.name})"),
    ]
    known = ["budget", "limit", "peak"] if lowest else ["budget", "held"]
    lines = [["may stay", *known, "moved out", "step" if trace.cycle else "pass", "x plain"]]
    for row in rows:
        sizes = [row.budget, row.limit or 0, row.peak or 0] if lowest else [row.budget, row.held_peak]
        times = [format_seconds(row.seconds), f"{row.slowdown:.2f}"]
        lines.append([f"{row.share:.0%}", *map(format_size, [*sizes, row.moved]), *times])
    return "\n".join([*(f"{name:<10}  {text}" for name, text in facts), "", *columns(lines, 0)])


def _first_facts(trace: Trace, rows: Sequence[LimitRow]) -> list[tuple[str, str]]:
    """What the first pass takes under the lowest limit of the table, if that is more than the limit."""
    lowest = min((row.limit for row in rows if row.limit is not None), default=0)
    peak = first_peak(trace, lowest)
    if not Budget(lowest).over(peak):
        return []
    why = "it has no plan yet, and does not know what its operations need"
    return [("first pass", f"up to {format_size(peak)} under the lowest limit below: {why}")]


def _cycle_facts(trace: Trace) -> list[tuple[str, str]]:
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
