"""What is to be done for the packages of a channel, side by side where one thing does not wait for another."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from dataclasses import dataclass
from pathlib import Path

from bundle import plan
from bundle.errors import BuildError, BundleError
from bundle.progress import say, steps


@dataclass(frozen=True)
class Task:
    """One thing to do for a package; `after` are the names of those that must have been built before it."""

    step: plan.Step
    test: bool  # or build
    reason: str
    after: frozenset[str]

    def __str__(self) -> str:
        return f"{self.step.package.file}: {'tested' if self.test else 'built'}"


def of(todo: Sequence[plan.Step], packages: Sequence[plan.Package]) -> list[Task]:
    """What is to be done and can be, in the order of the packages; says what cannot."""
    ours = {package.name for package in packages}
    runs_with = plan.dependencies(packages)
    found: list[Task] = []
    for step in todo:
        package = step.package
        if step.builds and step.unbuilt:
            say(f"{package.file} is not built, for lack of {', '.join(step.unbuilt)} (see FRAMEWORKS)")
            continue
        if step.builds and step.untested:
            say(f"{package.file} is built, but not tested, for lack of {', '.join(step.untested)} (see FRAMEWORKS)")
        if step.overdue:
            lack = ", ".join(step.untested)
            say(f"{package.file} is not tested with what changed, for lack of {lack} (see FRAMEWORKS)")
        if step.builds:
            after = plan.closure(package.builds_with, runs_with) & ours - {package.name}
            found.append(Task(step, False, step.builds, frozenset(after)))
        if step.tests:
            after = plan.closure([package.name, *package.tests_with], runs_with) & ours
            found.append(Task(step, True, step.tests, frozenset(after)))
    return found


def run(
    tasks: Sequence[Task],
    pool: Executor,
    at_once: int,
    job: Callable[[Task], Callable[[], Path]],
    take: Callable[[Task, Path], None],
) -> None:
    """Have `pool` do the `job` of each of `tasks`, `at_once` side by side, and hand on what it made to `take`.

    A package's tests do not keep others waiting that need it: all of them must pass before anything is published.
    Raises the error of the first task that fails, in their order, when what was begun has ended; says the others.
    """
    waiting = list(tasks)
    running: dict[Future[Path], tuple[Task, float]] = {}  # with the time when it began
    failed: dict[Task, BundleError] = {}
    lost: list[Task] = []  # that a process worked on when one of them died: the pool does not say which
    broken = False
    with steps("channel", len(tasks), "step") as step:
        while running or (waiting and not failed and not broken):
            ready = [] if failed or broken else _ready(waiting, [one for one, _ in running.values()])
            for task in ready[: at_once - len(running)]:
                try:
                    running[pool.submit(job(task))] = task, time.monotonic()
                except BrokenExecutor:
                    broken = True
                    break
                waiting.remove(task)
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                task, begun = running.pop(future)
                try:
                    made = future.result()
                except BundleError as error:
                    failed[task] = error
                except BrokenExecutor:
                    broken = True
                    lost.append(task)
                else:
                    take(task, made)
                    step(f"{task} in {time.monotonic() - begun:.1f} s ({task.reason})", 1)
        _raise_first(sorted(failed.items(), key=lambda one: tasks.index(one[0])), lost if broken else None)


def _raise_first(failed: Sequence[tuple[Task, BundleError]], lost: Sequence[Task] | None) -> None:
    """Raise the first error, if there is any, and say the others; `lost` is None where no process has died."""
    faults = [(task.step.package.file, error) for task, error in failed]
    if lost is not None:
        files = " or ".join(sorted(task.step.package.file for task in lost)) or "none of them"
        words = f"a process died that worked on {files}, as one does that needs more memory than there is"
        faults.append(("a process", BuildError(f"{words}; run this again")))
    for name, error in faults[1:]:
        say(f"{name} fails, too: {str(error).partition(chr(10))[0]}")
    if faults:
        raise faults[0][1]


def _ready(waiting: Sequence[Task], running: Sequence[Task]) -> list[Task]:
    """Those that wait for nothing any more; what others may wait for, a package that is built, comes first."""
    unbuilt = {task.step.package.name for task in (*waiting, *running) if not task.test}
    ready = [task for task in waiting if not task.after & unbuilt]
    return sorted(ready, key=lambda task: task.test)
