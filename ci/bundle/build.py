"""Brings the channel up to date: builds and tests what has changed, and publishes it when all of it has passed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path

from bundle import base, ending, index, lock, plan, published, rendered, tasks, workbench
from bundle.base import Base
from bundle.errors import ToolError
from bundle.folders import Folders, checksum_of, write
from bundle.progress import say
from bundle.rendered import Recipe
from bundle.tasks import Task

_FORMAT = 2  # counted up whenever this program makes other packages of the same recipes
_AT_ONCE = 4  # packages that are built side by side, where there are as many cores


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
        why = f"no recipe makes it for {where.mpi}" if where.mpi else "no recipe makes it any more"
        say(f"{place} is removed: {why}")
    for place in sorted(set(there) - wanted):  # what cannot be built again would be of older sources than the rest
        (where.staged / place).unlink()
    state.keep(wanted)
    named = {place: there[place] for place in wanted & set(there)}
    if not (where.staged / "noarch/repodata.json").is_file() or index.indexed(where.staged) != named:
        index.index(where.staged)
    if work := tasks.of(todo, packages):
        _work(work, where, base, platform, {one.package.place: one.recipe for one in all_}, state)
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


def _work(
    todo: Sequence[Task],
    where: Folders,
    base: Base,
    platform: str,
    recipes: Mapping[str, Recipe],
    state: _State,
) -> None:
    """Do all of it on as many processes as are of use, and keep what was made. Raises as `tasks.run`."""

    def job(task: Task) -> Callable[[], Path]:
        package = task.step.package
        if task.test:
            return partial(workbench.test, where, base, where.staged / package.place)
        return partial(workbench.make, where, base, platform, recipes[package.place], package.file)

    def take(task: Task, made: Path) -> None:
        place = task.step.package.place
        if task.test:
            state.note(place, replace(state.finished[place], tested=task.step.tested))
            return
        target = where.staged / place
        target.parent.mkdir(parents=True, exist_ok=True)
        made.replace(target)
        _forget(target.stem)
        shutil.rmtree(where.work / "made" / target.name, ignore_errors=True)
        index.index(where.staged)
        state.note(place, plan.Finished(task.step.built, "", checksum_of(target)))

    at_once = max(1, min(_AT_ONCE, os.cpu_count() or 1, len(todo)))
    # Spawned, and not forked: the builder has threads.
    with ProcessPoolExecutor(at_once, get_context("spawn"), ending.end_with, (os.getpid(),)) as pool:
        tasks.run(todo, pool, at_once, job, take)


def _forget(name: str) -> None:
    """Remove what the builder has unpacked of an earlier build of this name.

    It looks at no checksum before it tests: it would test what it finds there in the place of what was built, and fail
    where another process, which looks at it, unpacks the right one meanwhile.
    """
    if cache := os.environ.get("RATTLER_CACHE_DIR"):
        unpacked = Path(cache, "pkgs", name)
        shutil.rmtree(unpacked, ignore_errors=True)
        unpacked.with_name(f"{name}.lock").unlink(missing_ok=True)
