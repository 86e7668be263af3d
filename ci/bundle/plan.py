"""What is to be built, in which order, and whether it is there already. Knows no builder and no channel."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from bundle.errors import BundleError


@dataclass(frozen=True)
class Package:
    """One variant of one package, as it is rendered."""

    name: str
    version: str
    build: str  # the build string
    subdir: str
    python: str | None  # the variant's, where it has one
    builds_with: tuple[str, ...]  # the names of what it is built with
    runs_with: tuple[str, ...]  # of what it and its tests run with
    content: str  # a checksum of the rendered recipe and its sources

    @property
    def file(self) -> str:
        """The name of its file."""
        return f"{self.name}-{self.version}-{self.build}.conda"


@dataclass(frozen=True)
class Step:
    """A package in its turn: `key` is a checksum of all that it is made from, `reason` why it is built, if it is."""

    package: Package
    key: str
    reason: str | None


def needs(package: Package) -> set[str]:
    """The names of what it is built and tested with, itself left out."""
    return {*package.builds_with, *package.runs_with} - {package.name}


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


def lacking(package: Package, packages: Sequence[Package], left_out: Set[str]) -> tuple[list[str], list[str]]:
    """Which of `left_out`, that the channel below does not hold, `package` lacks to be built, and to be tested.

    Through our own packages too: what needs a metapackage needs what that needs.
    """
    runs: dict[str, set[str]] = {}
    for one in packages:
        runs.setdefault(one.name, set()).update(one.runs_with)

    def closure(names: Iterable[str]) -> set[str]:
        found: set[str] = set()
        waiting = list(names)
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting += runs.get(name, ())
        return found

    return sorted(closure(package.builds_with) & left_out), sorted(closure(package.runs_with) & left_out)


def steps(
    packages: Sequence[Package], tools: str, base: Mapping[str, str], state: Mapping[str, str], there: Iterable[str]
) -> list[Step]:
    """All packages in their order, each with its key and with the reason why it is to be built.

    `tools` is a checksum of what builds; `base` holds, for each name in the channel below ours, one of its packages;
    `state` the keys of finished packages by file, `there` the files of the channel.
    """
    there = set(there)
    keys: dict[str, str] = {}  # by name: of all variants of ours together
    made: list[Step] = []
    ordered = order(packages)
    for package in ordered:
        needs = {
            name: keys.get(name) or base.get(name, "") for name in sorted({*package.builds_with, *package.runs_with})
        }
        parts = [tools, package.file, package.content, needs]
        key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        keys[package.name] = hashlib.sha256((keys.get(package.name, "") + key).encode()).hexdigest()
        path = f"{package.subdir}/{package.file}"
        if path not in there:
            reason: str | None = "it is not in the channel"
        elif state.get(path) != key:
            reason = "what it is made from has changed"
        else:
            reason = None
        made.append(Step(package, key, reason))
    return made
