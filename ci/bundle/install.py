"""Solves and installs an environment, with conda's own rules and without conda."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import rattler
from rattler import (
    ChannelPriority,
    Gateway,
    PrefixRecord,
    RepoDataRecord,
    Subdir,
    VirtualPackage,
    VirtualPackageOverrides,
)
from rattler.install import InstallerReporter

from bundle import lock
from bundle.errors import InstallError, SolveError
from bundle.folders import checksum_of, is_ours, path_of
from bundle.pip import command
from bundle.progress import steps

MARK = "conda-meta/bascule"  # in an environment that was made here, and may be changed; its lock, too


def solve(specs: Sequence[str], channels: Sequence[str]) -> list[RepoDataRecord]:
    """The packages that satisfy `specs`, from `channels` in their order of preference.

    Raises SolveError with the solver's explanation.
    """

    async def run() -> list[RepoDataRecord]:
        return await rattler.solve(
            [rattler.Channel(channel) for channel in channels],
            list(specs),
            gateway=Gateway(show_progress=False),
            platforms=[Subdir.current(), Subdir("noarch")],
            virtual_packages=VirtualPackage.detect(VirtualPackageOverrides.from_env()),
            channel_priority=ChannelPriority.Strict,
        )

    try:
        return asyncio.run(run())
    except Exception as error:  # the solver's and the gateway's have no common base
        raise SolveError(
            f"no set of packages has {', '.join(specs)}\nfrom {', '.join(channels)}:\n{str(error).strip()}"
        ) from None


def install(
    records: Sequence[RepoDataRecord], prefix: Path, cache: Path | None = None, target: Path | None = None
) -> None:
    """Claim `prefix`, and make it hold `records` and no other package. Raises InstallError.

    It works where it lies, or only where it was moved to `target`: then it bears no mark, and is not changed again.
    """
    with claimed(prefix):
        put(records, prefix, cache, target)
        if target:
            (prefix / MARK).unlink()


@contextmanager
def claimed(prefix: Path) -> Generator[None]:
    """Mark `prefix` as made here; no other run changes it meanwhile. Raises InstallError where it is another's.

    Where nothing was put into it, it is gone again.
    """
    # Another run may be about to mark what it has just made. (One that takes its mark away, for an image, is waited for
    # by nobody: images have a lock of their own.)
    if not is_ours(prefix, MARK) and not (prefix.is_dir() and _is_bare(prefix)):
        raise InstallError(_whose(prefix))
    there = prefix.is_dir()
    with lock.held(prefix, name=MARK):
        try:
            yield
        finally:
            if _is_bare(prefix):
                shutil.rmtree(prefix / "conda-meta", ignore_errors=True)
                if not there:
                    with suppress(OSError):  # the user's own folder may be where nobody may remove it
                        prefix.rmdir()


def _whose(prefix: Path) -> str:
    """Why it is left alone, and what to do."""
    if not (prefix / "conda-meta").is_dir():
        return f"{prefix} is no environment, and holds other things: name an empty or a new folder"
    names = sorted(path.stem for path in prefix.glob("conda-meta/*.json"))
    shown = ", ".join(names[:3] + ["..."] * (len(names) > 3)) or "nothing"
    return (
        f"{prefix} is an environment that was not made here, and would be emptied of its {len(names)} packages "
        f"({shown}): name an empty or a new folder (PREFIX=DIR). One that an earlier `make env` made has no mark yet: "
        "if it is that, remove it"
    )


def _is_bare(prefix: Path) -> bool:
    """Whether there is nothing but our mark."""
    mark = prefix / MARK
    return not any(path not in (mark, mark.parent) for path in (*prefix.glob("*"), *mark.parent.glob("*")))


def put(records: Sequence[RepoDataRecord], prefix: Path, cache: Path | None = None, target: Path | None = None) -> None:
    """Make a prefix that was claimed hold `records` and no other package; nothing is done where it does.

    What was empty before holds all of it, or, where InstallError is raised, nothing.
    """
    damaged = [name for record in records if (name := _damage(record))]
    if damaged:
        raise InstallError(f"{prefix} was not touched, nothing was left behind: {'; '.join(damaged)}")
    new = _is_bare(prefix)
    try:
        with steps(f"install into {prefix}", len(records), "package", lines=False) as step:
            asyncio.run(
                rattler.install(
                    list(records),
                    target_prefix=prefix,
                    cache_dir=cache,
                    installed_packages=installed(prefix),
                    execute_link_scripts=False,
                    show_progress=False,
                    reporter=_Reporter(step),  # type: ignore[abstract] # the base's other methods do nothing
                    alternative_target_prefix=target,
                )
            )
    except BaseException as error:  # as above, or an interrupt
        if new:
            _empty(prefix)
        if not isinstance(error, Exception):
            raise
        state = "nothing was left behind" if new else f"{prefix} may hold some of it: run this again, or remove it"
        raise InstallError(f"{prefix} could not be installed ({state}): {str(error).strip()}") from None


def _empty(prefix: Path) -> None:
    """Remove all but our mark, by which others wait."""
    mark = prefix / MARK
    for path in (*prefix.glob("*"), *mark.parent.glob("*")):
        if path.is_dir() and not path.is_symlink():
            if path != mark.parent:
                shutil.rmtree(path, ignore_errors=True)
        elif path != mark:
            path.unlink(missing_ok=True)


def _damage(record: RepoDataRecord) -> str | None:
    """What is wrong with a package's file in a local channel, which rattler reads without a look at its checksum."""
    path = path_of(record.url)
    if path is None or record.sha256 is None:
        return None
    try:
        found = checksum_of(path)
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    if found == record.sha256.hex():
        return None
    return (
        f"{path} has checksum {found}, but its index says {record.sha256.hex()}: it is damaged. `make channel` "
        "mends its own; else make or copy it again"
    )


def clobbered(prefix: Path) -> list[str]:
    """The files that two packages of `prefix` both claim: one has its own in place, the other's was moved aside."""
    owners: dict[str, list[str]] = {}
    for record in installed(prefix):
        for path in map(Path, record.files):
            # rattler puts what loses into __clobbers__/PACKAGE/, and writes that into the package's record.
            place = Path(*path.parts[2:]) if path.parts[0] == "__clobbers__" else path
            owners.setdefault(str(place), []).append(record.name.normalized)
    return [f"{path} ({' and '.join(names)})" for path, names in sorted(owners.items()) if len(names) > 1]


def installed(prefix: Path) -> list[PrefixRecord]:
    """What conda-meta says of the packages in `prefix`; none where there is no such folder."""
    return [PrefixRecord.from_path(path) for path in sorted((prefix / "conda-meta").glob("*.json"))]


class _Reporter(InstallerReporter):
    """Tells a progress bar of each package that is in place."""

    def __init__(self, step: Callable[[str, int], None]) -> None:
        self.step = step
        self.names: dict[int, str] = {}

    def on_link_start(self, operation: int, package_name: str) -> int:
        """A package's files are about to be put in place."""
        self.names[operation] = package_name
        return operation

    def on_link_complete(self, index: int) -> None:
        """They are."""
        self.step(self.names.pop(index, ""), 1)


def pip(prefix: Path, requirements: Sequence[str], *options: str) -> None:
    """The user's own pip step of an environment file; `options` go to pip. Raises InstallError with its words."""
    arguments = [*command(prefix / "bin/python"), "install", *options, *requirements]
    done = subprocess.run(arguments, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise InstallError(f"pip could not install {', '.join(requirements)}:\n{done.stderr.strip()[-2000:]}")
