"""Installs an environment that was solved, without conda."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import rattler
from rattler import PrefixRecord, RepoDataRecord

from bundle import interpreter
from bundle.errors import BundleError
from bundle.folders import checksum_of, is_ours, path_of

MARK = "conda-meta/bascule"  # in an environment that was made here, and may be changed


def install(
    records: Sequence[RepoDataRecord], prefix: Path, cache: Path | None = None, target: Path | None = None
) -> None:
    """Make `prefix` hold `records` and no other package; nothing is done if it does.

    It works where it lies, or only where it was moved to `target`: then it bears no mark, and is not changed again.
    Raises BundleError: what was empty before then holds nothing.
    """
    if not is_ours(prefix, MARK):
        raise BundleError(
            f"{prefix} holds what was not made here, and would be emptied of it: name an empty or a new folder "
            "(PREFIX=DIR)"
        )
    if damaged := [name for record in records if (name := _damage(record))]:
        raise BundleError(f"{prefix} was not touched: {'; '.join(damaged)}")
    new = not (prefix / MARK).exists()
    (prefix / MARK).parent.mkdir(parents=True, exist_ok=True)
    (prefix / MARK).touch()
    try:
        asyncio.run(
            rattler.install(
                list(records),
                target_prefix=prefix,
                cache_dir=cache,
                installed_packages=installed(prefix),
                execute_link_scripts=False,
                show_progress=sys.stderr.isatty(),
                alternative_target_prefix=target,
            )
        )
    except BaseException as error:  # rattler's have no common base; an interrupt
        if new:
            shutil.rmtree(prefix, ignore_errors=True)
        if not isinstance(error, Exception):
            raise
        state = "nothing was left behind" if new else f"{prefix} may hold some of it: run this again, or remove it"
        raise BundleError(f"{prefix} could not be installed ({state}): {str(error).strip()}") from None
    if target:
        (prefix / MARK).unlink()


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
        f"{path} has checksum {found}, but its index says {record.sha256.hex()}: it is damaged. Make or copy it again"
    )


def clobbered(prefix: Path) -> list[str]:
    """The files that two packages of `prefix` both claim: one has its own in place, the other's was moved aside."""
    owners: dict[str, list[str]] = {}
    for record in installed(prefix):
        for path in map(str, record.files):
            # rattler puts what loses into __clobbers__/PACKAGE/, and writes that into the package's record.
            place = path.split("/", 2)[2] if path.startswith("__clobbers__/") else path
            owners.setdefault(place, []).append(record.name.normalized)
    return [f"{path} ({' and '.join(names)})" for path, names in sorted(owners.items()) if len(names) > 1]


def installed(prefix: Path) -> list[PrefixRecord]:
    """What conda-meta says of the packages in `prefix`; none if there is no such folder."""
    return [PrefixRecord.from_path(path) for path in sorted((prefix / "conda-meta").glob("*.json"))]


def pip(prefix: Path, *arguments: str) -> None:
    """Run the pip of this machine for an environment, which need not have one. Raises BundleError with its words."""
    command = [*interpreter.pip(prefix / "bin/python"), *arguments]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise BundleError(f"{prefix}: pip {' '.join(arguments)} fails:\n{(done.stdout + done.stderr).strip()[-2000:]}")
