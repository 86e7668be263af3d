"""Brings the channel up to date: builds and tests what has changed, and publishes it when all of it has passed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path

from bundle import base, ending, index, lock, plan, published, rendered, workbench
from bundle.base import Base
from bundle.errors import BuildError, BundleError, ToolError
from bundle.folders import Folders, checksum_of, write
from bundle.progress import say, steps

_FORMAT = 2  # counted up whenever this program makes other packages of the same recipes
_AT_ONCE = 4  # packages that are built side by side, where there are as many cores


@dataclass(frozen=True)
class _Task:
    """One thing to do for a package; `after` are the names of those that must have been built before it."""

    step: plan.Step
    test: bool  # or build
    reason: str
    after: frozenset[str]

    def __str__(self) -> str:
        return f"{self.step.package.file}: {'tested' if self.test else 'built'}"


def tools(base: Base) -> str:
    """What builds: when it changes, everything is built again.

    What a base holds is in each package's inputs where it is known; else the base's address stands for all of it.
    """
    address = "" if base.checksums else " ".join(base.channels)
    return f"{metadata.version('py-rattler-build')} {_FORMAT} {address}"


def build(where: Folders, base: Base, platform: str) -> list[plan.Step]:
    """Bring the channel up to date; what was to be done.

    All is made in a channel of the work folder. Users see it when it is finished: until then, and after a failure, the
    channel is what it was. What was built before a failure is not built again by the next run.

    Raises BuildError with the end of a log, RecipeError, ToolError.
    """
    if any(character.isspace() for character in str(where.work)):
        raise ToolError(
            f"{where.work}: builds do not work below a folder with spaces in its name; name another: "
            "`make channel OUT=DIR`, or --out before the command"
        )
    all_ = rendered.render(where, base, platform)
    packages = [one.package for one in all_]
    state = _State(where.work / "state.json")
    there = published.files(where.staged)
    state.see(base)
    todo = plan.steps(packages, tools(base), state.below, state.finished, there, base.left_out)
    wanted = {step.package.place for step in todo if not (step.builds and step.unbuilt)}
    for place in sorted(set(there) - {package.place for package in packages}):
        say(f"{place} is removed: no recipe makes it any more")
    for place in sorted(set(there) - wanted):  # what cannot be built again would be of older sources than the rest
        (where.staged / place).unlink()
    state.keep(wanted)
    named = {place: there[place] for place in wanted & set(there)}
    if not (where.staged / "noarch/repodata.json").is_file() or index.indexed(where.staged) != named:
        index.index(where.staged)
    if tasks := _tasks(todo, packages):
        _work(tasks, where, base, platform, {one.package.place: one.recipe for one in all_}, state)
    _publish(where, base)
    return todo


def _publish(where: Folders, below: Base) -> None:
    with lock.held(where.channel):
        published.publish(where.staged, where.channel)
        base.remember(below, where)


class _State:
    """What is known of the packages that were finished, kept in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.finished: dict[str, plan.Finished] = {}
        self.below: dict[str, str] = {}  # checksums of the channel below; empty: not looked at
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, KeyError):
            # Where there is none, or one of another version, all is built again.
            noted = json.loads(path.read_text())
            self.finished = {place: plan.Finished(**one) for place, one in noted["finished"].items()}
            self.below = dict(noted["below"])

    def see(self, base: Base) -> None:
        """Take the checksums of `base`, and keep those of what is left out of it.

        What was made with that is as good as before.
        """
        if not base.checksums:
            self.below = {}
            return
        kept = {name: self.below[name] for name in base.left_out & self.below.keys()}
        self.below = kept | dict(base.checksums)
        self._write()

    def keep(self, places: set[str]) -> None:
        """Forget the others."""
        self.finished = {place: one for place, one in self.finished.items() if place in places}

    def note(self, place: str, one: plan.Finished) -> None:
        """Keep what is known of one."""
        self.finished[place] = one
        self._write()

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        finished = {place: asdict(one) for place, one in self.finished.items()}
        write(self.path, json.dumps({"finished": finished, "below": self.below}, indent=1))


def _tasks(todo: Sequence[plan.Step], packages: Sequence[plan.Package]) -> list[_Task]:
    """What is to be done and can be, in the order of the packages; says what cannot."""
    ours = {package.name for package in packages}
    found: list[_Task] = []
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
            after = plan.closure(package.builds_with, packages) & ours - {package.name}
            found.append(_Task(step, False, step.builds, frozenset(after)))
        if step.tests:
            after = plan.closure([package.name, *package.tests_with], packages) & ours
            found.append(_Task(step, True, step.tests, frozenset(after)))
    return found


def _work(
    tasks: Sequence[_Task],
    where: Folders,
    base: Base,
    platform: str,
    recipes: Mapping[str, Path],
    state: _State,
) -> None:
    """All `tasks`, side by side where one does not wait for another's package to be built.

    A package's tests do not keep others waiting that need it: all of them must pass before anything is published.
    Raises the error of the first package that fails, in their order, when what was begun has ended.
    """
    waiting = list(tasks)
    running: dict[Future[Path], tuple[_Task, float]] = {}  # with the time when it began
    failed: dict[_Task, BundleError] = {}
    workers = max(1, min(_AT_ONCE, os.cpu_count() or 1, len(tasks)))
    # Spawned, and not forked: the builder has threads.
    with (
        ProcessPoolExecutor(workers, get_context("spawn"), ending.end_with, (os.getpid(),)) as pool,
        steps("channel", len(tasks), "step") as step,
    ):
        while running or (waiting and not failed):
            unbuilt = {
                one.step.package.name for one in (*waiting, *(one for one, _ in running.values())) if not one.test
            }
            ready = [] if failed else [task for task in waiting if not task.after & unbuilt]
            ready.sort(key=lambda task: task.test)  # others may wait for what is built
            for task in ready[: workers - len(running)]:
                waiting.remove(task)
                package = task.step.package
                if task.test:
                    future = pool.submit(workbench.test, where, base, where.staged / package.place)
                else:
                    future = pool.submit(workbench.make, where, base, platform, recipes[package.place], package.file)
                running[future] = task, time.monotonic()
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                task, begun = running.pop(future)
                try:
                    made = future.result()
                except BundleError as error:
                    failed[task] = error
                    continue
                except BrokenExecutor:
                    failed[task] = BuildError(
                        f"{task.step.package.file}: the process that worked on it died, as one does that needs more "
                        "memory than there is; run this again"
                    )
                    continue
                _take(made, task, where, state)
                step(f"{task} in {time.monotonic() - begun:.1f} s ({task.reason})", 1)
        if failed:
            first, *others = sorted(failed, key=tasks.index)
            for task in others:
                say(f"{task.step.package.file} fails, too: {str(failed[task]).partition(chr(10))[0]}")
            raise failed[first]


def _take(made: Path, task: _Task, where: Folders, state: _State) -> None:
    """Keep what was made, or that it has passed."""
    place = task.step.package.place
    if task.test:
        state.note(place, replace(state.finished[place], tested=task.step.tested))
        return
    target = where.staged / place
    target.parent.mkdir(parents=True, exist_ok=True)
    made.replace(target)
    shutil.rmtree(where.work / "made" / target.name, ignore_errors=True)
    index.index(where.staged)
    state.note(place, plan.Finished(task.step.built, "", checksum_of(target)))
