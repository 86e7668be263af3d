"""Brings the channel up to date: builds and tests what has changed, and takes in what has passed."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path

from bundle import index, plan, rendered, workbench
from bundle.base import Base
from bundle.errors import BuildError, BundleError, ToolError
from bundle.folders import Folders
from bundle.progress import say, steps

_FORMAT = 1  # counted up whenever this program makes other packages of the same recipes
_AT_ONCE = 4  # packages that are built side by side, where there are as many cores


@dataclass(frozen=True)
class _Task:
    """A package that is to be built."""

    step: plan.Step
    recipe: Path
    tested: bool

    @property
    def place(self) -> str:
        """Its file's, in the channel."""
        return f"{self.step.package.subdir}/{self.step.package.file}"


def tools() -> str:
    """What builds: when it changes, everything is built again. What it is made from is in each package's content."""
    return f"{metadata.version('py-rattler-build')} {_FORMAT}"


def build(where: Folders, base: Base, platform: str) -> list[plan.Step]:
    """Bring the channel up to date; what was to be done.

    Raises BuildError with the end of a log, RecipeError, ToolError. What was finished before stays, and is not built
    again by the next run.
    """
    if any(character.isspace() for character in str(where.work)):
        raise ToolError(
            f"{where.work}: builds do not work below a folder with spaces in its name; name another with --out"
        )
    all_ = rendered.render(where, base, platform)
    packages = [one.package for one in all_]
    state_file = where.work / "state.json"
    state: dict[str, str] = json.loads(state_file.read_text()) if state_file.exists() else {}
    there = [str(path.relative_to(where.channel)) for path in where.channel.glob("*/*.conda")]
    todo = plan.steps(packages, tools(), base.checksums, state, there)
    wanted = {f"{package.subdir}/{package.file}" for package in packages}
    for place in sorted(set(there) - wanted):
        (where.channel / place).unlink()
        say(f"{place} is removed: no recipe makes it any more")
    tasks = _tasks(todo, {one.package: one.recipe for one in all_}, packages, base)
    if tasks or set(there) - wanted or not (where.channel / "noarch/repodata.json").exists():
        index.index(where.channel, force=True)
    if tasks:
        state = {place: key for place, key in state.items() if place in wanted}
        _work(tasks, where, base, platform, state, state_file)
    return todo


def _tasks(
    todo: Sequence[plan.Step], recipes: Mapping[plan.Package, Path], packages: Sequence[plan.Package], base: Base
) -> list[_Task]:
    """What is to be built and can be; says what cannot."""
    found: list[_Task] = []
    for step in todo:
        if step.reason is None:
            continue
        file = step.package.file
        unbuilt, untested = plan.lacking(step.package, packages, base.left_out)
        if unbuilt:
            say(f"{file} is not built: {base.name} was made without {', '.join(unbuilt)}")
            continue
        if untested:
            say(f"{file} is built, but not tested: {base.name} was made without {', '.join(untested)}")
        found.append(_Task(step, recipes[step.package], not untested))
    return found


def _work(
    tasks: list[_Task], where: Folders, base: Base, platform: str, state: dict[str, str], state_file: Path
) -> None:
    """All `tasks`, those side by side that do not need each other. Raises the first error when the rest has ended."""
    waiting = list(tasks)
    running: dict[Future[Path], tuple[_Task, float]] = {}  # with the time when it began
    failed: BundleError | None = None
    workers = max(1, min(_AT_ONCE, os.cpu_count() or 1, len(tasks)))
    # Spawned, and not forked: the builder has threads.
    with (
        ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool,
        steps("channel", len(tasks), "package") as step,
    ):
        while running or (waiting and failed is None):
            unfinished = {task.step.package.name for task in (*waiting, *(task for task, _ in running.values()))}
            ready = [task for task in waiting if not plan.needs(task.step.package) & unfinished]
            for task in ready[: workers - len(running)] if failed is None else ():
                waiting.remove(task)
                file = task.step.package.file
                future = pool.submit(workbench.make, where, base, platform, task.recipe, file, tested=task.tested)
                running[future] = task, time.monotonic()
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                task, begun = running.pop(future)
                try:
                    made = future.result()
                except BundleError as error:
                    failed = failed or error
                    continue
                except BrokenExecutor:
                    failed = failed or BuildError(
                        f"{task.step.package.file}: the process that built it died, as one does that needs more memory "
                        "than there is; run this again"
                    )
                    continue
                _take(made, task, where)
                state[task.place] = task.step.key
                _write(state_file, state)
                words = "built and tested" if task.tested else "built"
                step(f"{task.step.package.file}: {words} in {time.monotonic() - begun:.1f} s ({task.step.reason})", 1)
        if failed is not None:
            raise failed


def _take(made: Path, task: _Task, where: Folders) -> None:
    """Into the channel, from which the next are built."""
    target = where.channel / task.place
    target.parent.mkdir(parents=True, exist_ok=True)
    made.replace(target)
    shutil.rmtree(where.work / "made" / target.name, ignore_errors=True)
    index.index(where.channel, force=True)


def _write(path: Path, state: Mapping[str, str]) -> None:
    aside = path.with_suffix(".new")
    aside.write_text(json.dumps(state, indent=1))
    aside.replace(path)
