"""A plan for a recorded step as text: what it is forecast to cost, its lower bound, each record's decision."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lms.core.link import Link
from lms.core.trace import Trace
from lms.errors import UsageError
from lms.stats import format_seconds
from lms.units import format_size

if TYPE_CHECKING:
    from lms.core.plan import Plan


def forecast_text(trace: Trace, plan: Plan, link: Link) -> str:
    """What the plan moves, and what the pass and the step then take: sizes, seconds, the reasons for waiting."""
    from lms.core.plan import step_peak  # here, because it loads NumPy

    forecast, peak = plan.forecast, step_peak(trace, plan)
    bound = f"limit {format_size(plan.limit)}" if plan.limit is not None else f"budget {format_size(plan.budget)}"
    slower = f" ({forecast.seconds / trace.seconds:.2f} x its computation alone)" if trace.seconds else ""
    step, plain = trace.step_seconds(forecast.seconds), trace.step_seconds(trace.seconds)
    in_all = [("step", f"{format_seconds(step)} ({step / plain:.2f} x the step with nothing swapped)")]
    lines = [
        ("under", bound),
        ("link", f"{link.name}: {format_size(link.out)}/s out, {format_size(link.back)}/s back"),
        ("swapped", f"{len(plan.moved())} of {trace.movable} records"),
        ("out, back", f"{format_size(forecast.out)}, {format_size(forecast.back)} of {format_size(trace.saved)} saved"),
        ("held at most", format_size(forecast.held_peak)),
        *([("peak", format_size(peak))] if peak else []),
        *([("floor", f"{format_size(plan.floor)}, {plan.floor_module}")] if plan.floor else []),
        ("pass", f"{format_seconds(forecast.seconds)}{slower}"),
        *(in_all if trace.cycle else []),
        (
            "waiting",
            f"{format_seconds(forecast.stall_out)} for copies out, {format_seconds(forecast.stall_in)} for back",
        ),
    ]
    return "\n".join(f"{name:<12}  {text}" for name, text in lines)


def bound_text(trace: Trace, plan: Plan, link: Link, *, effort: float) -> str:
    """The time that no plan can go below. The solver stops after `effort` seconds. Raises UsageError if it cannot."""
    from lms.core.bound import least_seconds

    budget = plan.budget if plan.limit is None else None
    try:
        bound = least_seconds(trace, link, limit=plan.limit, budget=budget, effort=effort)
    except UsageError as error:
        raise UsageError(f"--bound: {error}") from None
    gap = bound.gap(plan.forecast.seconds)
    how = f"takes at most {gap:.1%} more than the best" if gap >= 0.0005 else "is as fast, to 0.1%"
    stopped = "" if bound.solved else f"; {bound.why}, so the true gap may be smaller"
    return f"{'bound':<12}  {format_seconds(bound.seconds)}: no plan takes less; this one {how}{stopped}"


def records_text(trace: Trace, plan: Plan) -> str:
    """A line for each record: its number, bytes and module, and what becomes of it, with the reason."""
    width = max((len(record.module) for record in trace.records), default=0)
    return "\n".join(
        f"{index:>5}  {format_size(record.nbytes):>8}  {record.module:<{width}}  {plan.reasons.get(index, '')}"
        for index, record in enumerate(trace.records)
    )
