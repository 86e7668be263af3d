"""Links that are about to be measured: their tasks, and the division of the time among them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from lms.console import show_progress
from lms.documents import MOST_BYTES
from lms.errors import LMSError
from lms.link.profile import Absence, MeasuredLink
from lms.link.series import Direction, Series
from lms.link.sweep import Copy, sweep
from lms.units import format_size

_LATE = 0.1  # of the time is still given to what comes when all of it is over
_AT_LEAST = 1 / 3  # of a task's share of the time is for copying, however long the preparation took

Open = Callable[[], AbstractContextManager[Copy]]


@dataclass
class Task:
    """One series to measure. `weight` is its share of the time.

    `via` and `most`, the bytes of the largest copy, are called when its turn comes, because earlier measurements may
    decide them. A copy of less than `least` bytes may stay in a cache, so it does not count for the rate; without a
    larger one there is no figure.
    """

    direction: Direction
    via: Callable[[], str]
    open: Open
    sizes: tuple[int, ...]
    weight: float = 1.0
    done: Callable[[Series], None] = lambda series: None
    least: int = 0
    most: Callable[[], int] = lambda: MOST_BYTES


@dataclass
class Draft:
    """A link whose series are still to come."""

    link: MeasuredLink
    tasks: list[Task] = field(default_factory=list)
    close: Callable[[], None] = lambda: None


def run(
    drafts: list[Draft],
    available: float,
    absent: list[Absence],
    clock: Callable[[], float] = time.monotonic,
) -> list[MeasuredLink]:
    """Measure the drafts one after the other, each task for its share of what is left of `available` seconds.

    What fails is named in `absent`; the series that were complete are kept.
    """
    whole = sum(task.weight for draft in drafts for task in draft.tasks) or 1.0
    begun = 0.0
    deadline = clock() + available
    links = []
    for draft in drafts:
        link = draft.link
        failed = set()
        try:
            for task in draft.tasks:
                title = f"{link.name}, {task.direction}"
                show_progress(f"{begun / whole:4.0%}  {title}")
                left = max(deadline - clock(), _LATE * available)
                seconds = left * task.weight / (whole - begun)
                begun += task.weight
                try:
                    link = _with(link, task, seconds, clock)
                except (LMSError, RuntimeError, OSError) as error:  # RuntimeError: PyTorch's of CUDA's errors
                    why = " ".join(str(error).split())
                    if why not in failed:  # a GPU that is gone fails in each task, and is named once
                        absent.append(Absence(title, why))
                    failed.add(why)
        finally:
            show_progress("")
            draft.close()
        if link.series:
            links.append(link)
    return links


def _with(link: MeasuredLink, task: Task, seconds: float, clock: Callable[[], float]) -> MeasuredLink:
    end, most = clock() + seconds, task.most()
    sizes = [one for one in task.sizes if one <= most]
    with task.open() as copy:  # which takes some of the time itself: memory is filled, files are written
        swept = sweep(copy, sizes, max(end - clock(), _AT_LEAST * seconds), clock)
    if swept[-1].nbytes < task.least:
        raise LMSError(
            f"{task.via()}: no copy of {format_size(task.least)} or more fitted into the time, "
            "and smaller ones may lie in the caches"
        )
    ways = 2 if task.direction == "both" else 1
    points = [replace(point, nbytes=point.nbytes * ways) for point in swept]
    series = Series.of(task.direction, task.via(), points, task.least)
    task.done(series)
    notes = link.notes
    if len(swept) < len(task.sizes):
        above = format_size(points[-1].nbytes)
        notes = (*notes, f"{task.direction}, {series.via}: sizes above {above} left out: there was no time for them")
    return replace(link, series=(*link.series, series), notes=notes)
