"""Advice from the figures of a rank: each piece with the figure that it rests on and the option to change. Pure."""

from __future__ import annotations

from ddl.figures import Stats
from lms.advice import LEAST_SECONDS, Advice
from lms.stats import format_seconds

LEAST_CALLS = 20  # timed ones; and those at which a rank was late, as a long pause or two is no habit
LONG = 0.05  # of the time. Not a share of the calls: of several in a step, a late rank is late at the first


def advice(stats: Stats, elapsed: float) -> list[Advice]:
    """What the figures of `elapsed` seconds support: the ranks that are late again and again, the latest first."""
    if stats.timed < LEAST_CALLS or elapsed < LEAST_SECONDS:
        return []
    found = []
    for rank, calls in stats.late.items():
        waited = stats.waited.get(rank, 0.0)
        if calls >= LEAST_CALLS and waited >= LONG * elapsed:
            text = (
                f"rank {rank} was late at {calls} of {stats.timed} calls, and this rank waited "
                f"{format_seconds(waited)} of {format_seconds(elapsed)} for it: look at what it does between the calls "
                "and what else its host does, give it less to do, or leave its host out (ddlrun -H)"
            )
            found.append(Advice("late", waited / elapsed, "hosts", text))
    return sorted(found, key=lambda one: -one.figure)
