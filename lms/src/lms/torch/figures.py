"""A session's figures, gathered from its parts."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from lms.runtime.planner import PassPlanner
from lms.stats import Stats
from lms.torch.state import Figures
from lms.torch.swapper import SavedTensorSwapper


def figures(
    planner: PassPlanner,
    swapper: SavedTensorSwapper,
    state: Figures,
    usage: Mapping[str, int],
    stalled: tuple[float, float],
    *,
    wait: bool,
) -> Stats:
    """The figures so far. `usage` is the engine's; `stalled` are the seconds waited for copies out, and back.

    `wait`: for the device to reach the end of the last step; else nothing is asked of the device.
    """
    plan, trace, last = planner.plan, planner.trace, planner.last
    progress, counters = planner.progress, swapper.counters
    cycle = progress.cycle(wait=wait)
    stats = Stats(
        steps=progress.steps,
        passes=progress.passes,
        limit=planner.limit,
        budget=planner.client.most,
        peak=planner.peaks.most,
        saved=planner.client.wanted,
        recorded=swapper.recorded,
        held_peak=max(planner.held_peak, swapper.stepper.holdings.held_peak),
        largest=trace.largest if trace is not None else 0,
        swapped_out=counters.out,
        swapped_in=counters.back,
        stall_out=stalled[0],
        stall_in=stalled[1],
        state=state.nbytes,
        state_held=state.held,
        state_out=state.out,
        state_in=state.back,
        state_stall=state.waited,
        host_peak=usage.get("host_peak", 0),
        file_peak=usage.get("file_peak", 0),
        misses=swapper.stepper.misses,
        made_room=swapper.stepper.made_room,
        replans=planner.replans,
        step_time=statistics.median(progress.step_times) if progress.step_times else None,
        elapsed=progress.elapsed,
        step_busy=cycle.busy if cycle is not None else None,
        hook_time=counters.hook,
        **{f"kept_{reason}": nbytes for reason, nbytes in swapper.movable.stayed.items()},
    )
    if plan is not None and trace is not None:
        stats.budget, stats.floor = plan.budget, plan.floor or None
        stats.predicted_peak = plan.forecast.resident_peak or None
        stats.predicted_step_time = progress.cycled(trace, wait=wait).step_seconds(plan.forecast.seconds)
    if last is not None:
        stats.last_out, stats.last_in = last.counters.out, last.counters.back
        stats.last_stall_out, stats.last_stall_in = last.counters.stall_out, last.counters.stall_in
        stats.last_seconds = last.recorder.seconds
    return stats
