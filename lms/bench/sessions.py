"""The figures that the benchmark reads from a session of LMS."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from lms import Session
from lms.core.gaps import find_gaps, held_before
from lms.core.plan import floor
from lms.core.trace import Trace


def forecast(session: Session) -> dict[str, float]:
    """The simulator's forecast for the next pass; empty while nothing is planned to move."""
    plan = session.plan
    if plan is None or not plan.moves:
        return {}
    told = plan.forecast
    return {
        "seconds": told.seconds,
        "held_peak": told.held_peak,
        "busy_out": told.busy_out,
        "busy_in": told.busy_in,
        "stall_out": told.stall_out,
        "stall_in": told.stall_in,
        "out": told.out,
        "back": told.back,
    }


def describe(session: Session) -> dict[str, float]:
    """The session's counters, and what its last pass measured under the names of the forecast."""
    found = {key: float(value) for key, value in session.stats().items() if value is not None}
    timeline = session.timeline
    for key, lane in (("busy_out", "out"), ("busy_in", "back")):
        spans = timeline.spans if timeline is not None else ()
        found[key] = sum(span.end - span.start for span in spans if span.lane == lane)
    last = session._planner.last  # the session's own figure is the most of all passes
    found["pass_held_peak"] = float(last.held_peak) if last is not None else 0.0
    trace = session.trace
    budget = session.options.budget
    found["held_at_floor"] = float(held_at_floor(trace)) if trace else 0.0
    found["again"] = float(forced_again(trace, budget + trace.largest)) if trace and budget is not None else 0.0
    # Asking for the link of a session that moved nothing would make it move something.
    link = session.link() if found["swapped_out"] else None
    found["link_out"], found["link_back"] = (link.out, link.back) if link is not None else (0.0, 0.0)
    return found


def held_at_floor(trace: Trace) -> int:
    """Bytes of the records that are in hand at the floor; 0 if memory was not measured."""
    lowest, _ = floor(trace)
    held = held_before(trace, find_gaps(trace))
    others = [*(access.other for access in trace.accesses), trace.tail_other]
    return next((int(bytes_) for bytes_, other in zip(held, others, strict=True) if bytes_ + other == lowest), 0)


def forced_again(trace: Trace, most: int) -> int:
    """Bytes that must come back a second time while no more than `most` bytes of records are held.

    Between two uses of a record its bytes cannot stay when another record is used there that has no room beside it.
    """
    used = [trace.tensors[access.tensor] for access in trace.accesses]
    total = 0
    for index, tensor in enumerate(trace.tensors):
        for use, following in pairwise(() if tensor.pinned else trace.positions(index, "read")):
            between = [other for other in used[use + 1 : following] if other is not tensor and not other.pinned]
            if any(other.nbytes + tensor.nbytes > most for other in between):
                total += tensor.nbytes
    return total


def before_reset(session: Session, notice: Callable[[], None]) -> None:
    """Call `notice` before the session begins its measurement of the device's peak anew, which would hide ours."""
    reset = session.device.reset_peak

    def noticed() -> None:
        notice()
        reset()

    session.device.reset_peak = noticed  # type: ignore[method-assign]
