"""Brings the channel up to date: builds and tests what has changed, and publishes it when all of it has passed."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from dataclasses import dataclass
from graphlib import TopologicalSorter
from importlib import metadata
from pathlib import Path

import rattler_build
from rattler_build.progress import LogEvent, SimpleProgressCallback

from bundle import base, channel, process, recipes
from bundle.base import Base
from bundle.errors import BundleError
from bundle.folders import Folders, checksum_of, write
from bundle.process import say
from bundle.recipes import Package, Variants, digest

_AT_ONCE = 4  # packages that are built and tested side by side, on as many cores
_TAIL = 40  # lines of a log that an error shows
_BUILDER = metadata.version("py-rattler-build")


@dataclass(frozen=True)
class Keys:
    """Checksums of what a package is built from, and of what it is tested with; "" if that is not to be had."""

    built: str
    tested: str


@dataclass(frozen=True)
class Step:
    """A package to be built, or one that is there to be tested."""

    package: Package
    tests: bool

    def __str__(self) -> str:
        return f"{self.package.file}: {'tested' if self.tests else 'built'}"


def build(where: Folders, below: Base, platform: str) -> list[Step]:
    """Bring the channel up to date; what was done for it.

    All is made in a channel of the work folder, and users see it when it is finished. What was built before a failure
    is not built again by the next run. Raises BundleError with the end of a log.
    """
    if any(character.isspace() for character in str(where.work)):
        raise BundleError(
            f"{where.work}: builds do not work below a folder with spaces in its name: make channel OUT=DIR"
        )
    chosen = recipes.variants(where, below.variants)
    packages = recipes.packages(where, platform, chosen)
    keys = keyed(packages, below)
    staged, noted = where.work / "channel", where.work / "state.json"
    state: dict[str, dict[str, str]] = json.loads(noted.read_text()) if noted.is_file() else {}
    there = {str(path.relative_to(staged)): checksum_of(path) for path in staged.glob("*/*.conda")}
    todo = steps(packages, keys, state, there)
    stale = {step.package.place for step in todo if not step.tests} | (there.keys() - {one.place for one in packages})
    for place in stale:
        (staged / place).unlink(missing_ok=True)
        state.pop(place, None)
    for one in packages:
        if not keys[one.file].built or not keys[one.file].tested:
            what = "tested" if keys[one.file].built else "built"
            say(f"{one.file} is not {what}, for lack of {', '.join(sorted(below.left_out))} (FRAMEWORKS names them)")
    channel.index(staged)
    at_once = min(_AT_ONCE, os.cpu_count() or 1, len(todo))
    with process.pool(at_once) as pool:
        running: dict[Future[Path], tuple[Step, float]] = {}
        ready: list[Step] = []
        failed: list[BundleError] = []
        graph = TopologicalSorter(order(todo, packages))
        graph.prepare()
        while running if failed else graph.is_active():  # what was begun when another fails is kept
            ready += graph.get_ready()
            ready.sort(key=lambda one: one.tests)  # builds come first: others wait for them
            channels = [staged.as_uri(), below.address]
            while ready and len(running) < at_once and not failed:
                step = ready.pop(0)
                if step.tests:
                    future = pool.submit(_test, staged / step.package.place, where, channels)
                else:
                    future = pool.submit(_make, step.package, chosen, platform, where, channels)
                running[future] = step, time.monotonic()
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                step, begun = running.pop(future)
                place, key = step.package.place, keys[step.package.file]
                try:
                    made = future.result()
                except BundleError as error:
                    failed.append(error)
                    continue
                except BrokenExecutor:
                    words = "a process died, as one does that needs more memory than there is: run this again"
                    failed.append(BundleError(f"{step.package.file}: {words}"))
                    continue
                if step.tests:
                    state[place]["tested"] = key.tested
                else:
                    (staged / place).parent.mkdir(exist_ok=True)
                    made.replace(staged / place)
                    # What the builder unpacked of an earlier build: it would test that, as it looks at the name alone.
                    shutil.rmtree(Path(os.environ["RATTLER_CACHE_DIR"], "pkgs", made.stem), ignore_errors=True)
                    channel.index(staged)
                    state[place] = {"built": key.built, "sha256": checksum_of(staged / place)}
                write(noted, json.dumps(state, indent=1))
                say(f"{step} in {time.monotonic() - begun:.1f} s")
                graph.done(step)
    for other in failed[1:]:
        say(f"fails, too: {str(other).partition(chr(10))[0]}")
    if failed:
        raise failed[0]
    publish(staged, where.channel)
    base.remember(below, where)
    return todo


def keyed(packages: Sequence[Package], below: Base) -> dict[str, Keys]:
    """The keys of each package's file: what a package runs with changes no byte of it, and has it tested again."""
    by_name: dict[str, list[Package]] = defaultdict(list)
    for one in packages:
        by_name[one.name].append(one)
    needs = {name: _closure_of(all_) & by_name.keys() - {name} for name, all_ in by_name.items()}
    found: dict[str, Keys] = {}
    whole: dict[str, str] = {}  # by name, of a package of ours with all that comes along
    lacking = set(below.left_out)

    def of(names: Iterable[str]) -> dict[str, str]:
        return {name: whole.get(name) or below.checksums.get(name, below.address) for name in names}

    for name in TopologicalSorter(needs).static_order():
        runs: set[str] = set()
        for one in by_name[name]:
            built = digest(_BUILDER, one.file, one.content, of(one.builds_with))
            tested = digest(built, of(one.runs_with | one.tests_with))
            runs |= one.runs_with
            if one.builds_with & lacking:
                built = ""
            found[one.file] = Keys(built, "" if (one.runs_with | one.tests_with) & lacking or not built else tested)
        whole[name] = digest([found[one.file].built for one in by_name[name]], of(runs))
        if runs & lacking or not all(found[one.file].built for one in by_name[name]):
            lacking.add(name)
    return found


def _closure_of(packages: Iterable[Package]) -> set[str]:
    return {name for one in packages for name in one.builds_with | one.runs_with | one.tests_with}


def steps(
    packages: Sequence[Package],
    keys: Mapping[str, Keys],
    state: Mapping[str, Mapping[str, str]],
    there: Mapping[str, str],
) -> list[Step]:
    """What is to be done, by the `state` of what was done and the checksums of the files that are `there`."""
    found = []
    for one in packages:
        key, old = keys[one.file], state.get(one.place, {})
        good = old.get("built") == key.built and old.get("sha256") == there.get(one.place)
        if key.built and not good:
            found.append(Step(one, tests=False))
        if key.tested and (not good or old.get("tested") != key.tested):
            found.append(Step(one, tests=True))
    return found


def order(todo: Collection[Step], packages: Sequence[Package]) -> dict[Step, set[Step]]:
    """Each step with those that come before it: the builds of what it is built or tested with, and its own."""
    runs: dict[str, set[str]] = defaultdict(set)
    for one in packages:
        runs[one.name] |= one.runs_with
    builds = [step for step in todo if not step.tests]

    def before(step: Step) -> set[Step]:
        one, names = step.package, set[str]()
        waiting = {*one.runs_with, *one.tests_with} if step.tests else set(one.builds_with)
        while waiting:
            names.add(name := waiting.pop())
            waiting |= runs[name] - names
        return {other for other in builds if other.package.name in names or (step.tests and other.package == one)}

    return {step: before(step) - {step} for step in todo}


def _make(package: Package, chosen: Variants, platform: str, where: Folders, channels: list[str]) -> Path:
    """Build a package, in a process of its own; where it lies. Raises BundleError with the end of the log."""
    log = _Log(where.work / "logs" / f"{package.file}.txt")
    folder = where.work / "made" / package.file
    shutil.rmtree(folder, ignore_errors=True)
    for variant in recipes.render(package.recipe, platform, chosen):
        said = variant.recipe.to_dict()
        if package.file == f"{said['package']['name']}-{said['package']['version']}-{said['build']['string']}.conda":
            try:
                result = variant.run_build(output_dir=folder, channels=channels, progress_callback=log)
            except rattler_build.RattlerBuildError as error:
                raise BundleError(f"{package.file} could not be built: {error}\n{log.tail()}") from None
            return Path(result.packages[0])
    raise BundleError(f"{package.recipe} makes no {package.file} any more: run this again")


def _test(made: Path, where: Folders, channels: list[str]) -> Path:
    """Run the tests of a package, each in an environment of its own; the package. Raises BundleError as above."""
    log = _Log(where.work / "logs" / f"{made.name}.tests.txt")
    try:
        results = rattler_build.Package.from_file(made).run_tests(channel=channels, progress_callback=log)
    except rattler_build.RattlerBuildError as error:
        raise BundleError(f"{made.name}: its tests do not run: {error}\n{log.tail()}") from None
    if not all(result.success for result in results):
        raise BundleError(f"{made.name}: its test fails:\n{log.tail()}")
    return made


class _Log(SimpleProgressCallback):
    """A file for all that is said while a package is built or tested; nothing is printed meanwhile."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.file = path, path.open("w")
        for stream in (1, 2):  # the builder's and the compilers' own
            os.dup2(self.file.fileno(), stream)

    def on_log(self, event: LogEvent) -> None:
        """A line of the builder or of what it runs."""
        self.file.write(event.message + "\n")
        self.file.flush()

    def tail(self) -> str:
        """The last lines, and where all of it is."""
        lines = self.path.read_text(errors="replace").splitlines()
        return "\n".join([*lines[-_TAIL:], f"(all of it: {self.path})"])


def publish(staged: Path, target: Path) -> None:
    """Make the channel `target` hold what `staged` holds: whole, or as it was."""
    new, old = target.with_name(f".{target.name}.new"), target.with_name(f".{target.name}.old")
    for left in (new, old):
        shutil.rmtree(left, ignore_errors=True)
    # Packages are replaced and never written to, the index may be.
    shutil.copytree(staged, new, copy_function=lambda a, b: (os.link if a.endswith(".conda") else shutil.copy2)(a, b))
    if target.exists():
        target.rename(old)
    new.rename(target)
    shutil.rmtree(old, ignore_errors=True)
