"""What is to be built and tested, and in which order; or whether it is there already. Knows no builder, no channel."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from bundle.errors import BundleError


@dataclass(frozen=True)
class Package:
    """One variant of one package, as it is rendered."""

    name: str
    version: str
    build: str  # the build string
    subdir: str
    builds_with: tuple[str, ...]  # the names of what it is built with
    runs_with: tuple[str, ...]  # of what it runs with
    tests_with: tuple[str, ...]  # of what its tests run with besides
    content: str  # a checksum of the rendered recipe and its sources
    variant: Mapping[str, str] = field(default_factory=dict, hash=False)  # what it chooses of conda_build_config.yaml

    @property
    def file(self) -> str:
        """The name of its file."""
        return f"{self.name}-{self.version}-{self.build}.conda"

    @property
    def place(self) -> str:
        """Its file's, in a channel."""
        return f"{self.subdir}/{self.file}"

    def goes_with(self, other: Package) -> bool:
        """Whether one environment can hold both, as far as variants go: of what both choose, they choose the same."""
        return all(other.variant.get(key, value) == value for key, value in self.variant.items())


@dataclass(frozen=True)
class Finished:
    """A file that was made: checksums of what it was built from, of what it passed its tests with, and of itself."""

    built: str
    tested: str  # "" where it was not
    sha256: str


@dataclass(frozen=True)
class Step:
    """A package in its turn, with the reasons why it is built and why it is tested, if it is."""

    package: Package
    built: str  # as a finished one's
    tested: str
    builds: str | None
    tests: str | None
    unbuilt: tuple[str, ...] = ()  # what it lacks to be built
    untested: tuple[str, ...] = ()  # to be tested
    overdue: bool = False  # it is there, did not pass its tests with what is there now, and cannot be tested

    @property
    def reason(self) -> str | None:
        """Why something is to be done."""
        return self.builds or self.tests


def needs(package: Package) -> set[str]:
    """The names of what it is built and tested with, itself left out."""
    return {*package.builds_with, *package.runs_with, *package.tests_with} - {package.name}


def order(packages: Sequence[Package]) -> list[Package]:
    """So that each comes after what it is built with and tested with. Raises BundleError where that is a circle."""
    waiting = sorted(packages, key=lambda package: (package.name, package.build))
    done: list[Package] = []
    while waiting:
        left = {package.name for package in waiting}
        ready = [package for package in waiting if not needs(package) & left]
        if not ready:
            raise BundleError(f"these packages need each other in a circle: {', '.join(sorted(left))}")
        done += ready
        waiting = [package for package in waiting if package not in ready]
    return done


def dependencies(packages: Sequence[Package]) -> dict[str, set[str]]:
    """By name, the names of what any variant of it runs with."""
    found: dict[str, set[str]] = {}
    for one in packages:
        found.setdefault(one.name, set()).update(one.runs_with)
    return found


def closure(names: Iterable[str], runs_with: Mapping[str, Collection[str]]) -> set[str]:
    """`names`, what they run with, what that runs with, and so on."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += runs_with.get(name, ())
    return found


def lacking(package: Package, packages: Sequence[Package], left_out: Set[str]) -> tuple[list[str], list[str]]:
    """Which of `left_out`, that the channel below is to be used without, `package` lacks to be built, to be tested.

    A metapackage lacks what its packages lack.
    """
    runs_with = dependencies(packages)
    unbuilt = closure(package.builds_with, runs_with) & left_out
    return sorted(unbuilt), sorted(closure((*package.runs_with, *package.tests_with), runs_with) & left_out)


def steps(
    packages: Sequence[Package],
    tools: str,
    base: Mapping[str, str],
    state: Mapping[str, Finished],
    there: Mapping[str, str],
    left_out: Set[str] = frozenset(),
) -> list[Step]:
    """All packages in their order, each with the reasons why it is to be built and to be tested.

    `tools` is a checksum of what builds; `base` holds, for each name in the channel below ours, one of its packages and
    of all that come along with them, and of those `left_out` the last that was known; `state` what is known of finished
    packages by place, `there` the checksums of the files.

    A package is built again when something changed that it is built from: what it merely runs with changes no byte of
    it, and has it tested again.
    """
    runs: dict[str, list[tuple[Package, str]]] = {}  # ours by name, with checksums of all that comes along with each
    absent: set[str] = set()  # ours that cannot be built and are not there
    made: list[Step] = []
    for package in order(packages):

        def of(names: Iterable[str], package: Package = package) -> dict[str, list[str] | str]:
            found: dict[str, list[str] | str] = {}
            for name in sorted(names):
                ours = [with_it for other, with_it in runs.get(name, ()) if other.goes_with(package)]
                found[name] = ours or base.get(name, "")
            return found

        unbuilt, untested = lacking(package, packages, left_out | absent)
        built = _checksum(tools, package.file, package.content, of(package.builds_with))
        with_it = _checksum(built, of(package.runs_with))
        now = _checksum(with_it, of(package.tests_with))
        tested = "" if untested else now
        old = state.get(package.place)
        builds = tests = None
        if package.place not in there:
            builds = "it is not in the channel"
        elif old is None or old.built != built:
            builds = "what it is made from has changed"
        elif old.sha256 != there[package.place]:
            builds = "its file is damaged"
        elif tested and old.tested != tested:
            tests = "what it runs with has changed" if old.tested else "it has not passed its tests yet"
        if builds and tested:
            tests = builds
        overdue = bool(untested) and not builds and old is not None and old.tested != now
        made.append(Step(package, built, tested, builds, tests, tuple(unbuilt), tuple(untested), overdue))
        runs.setdefault(package.name, []).append((package, with_it))
        if builds and unbuilt:
            absent.add(package.name)
    return made


def _checksum(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
