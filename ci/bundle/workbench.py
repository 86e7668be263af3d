"""One package is built, or tested, in a process of its own, with all that is said in a log of its own."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import rattler_build
from rattler_build.progress import (
    BuildStepEvent,
    DownloadCompleteEvent,
    DownloadProgressEvent,
    DownloadStartEvent,
    LogEvent,
)

from bundle import rendered
from bundle.base import Base
from bundle.errors import BuildError
from bundle.folders import Folders
from bundle.rendered import Recipe

_TAIL = 40  # lines of a log that are shown where something failed


def make(where: Folders, base: Base, platform: str, recipe: Recipe, file: str) -> Path:
    """Build `file` of `recipe`, without its tests; where it lies. Raises BuildError with the end of the log.

    What the builder and compilers print goes to the log: in this process nothing else is printed.
    """
    log = _Log(where.work / "logs" / f"{file}.txt")
    folder = where.work / "made" / file
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    variant = rendered.again(recipe, file, folder / "recipe", platform)
    try:
        result = variant.run_build(output_dir=folder / "built", channels=_channels(where, base), progress_callback=log)
    except rattler_build.RattlerBuildError as error:
        raise BuildError(f"{file} could not be built: {error}\n{log.tail()}\n(all of it: {log.path})") from None
    (made,) = [Path(path) for path in result.packages]
    if made.name != file:
        raise BuildError(f"{file} was to be built, but the builder made {made.name}")
    return made


def test(where: Folders, base: Base, made: Path) -> Path:
    """Run the tests of the package `made`, each in an environment of its own; `made`. Raises BuildError as above."""
    log = _Log(where.work / "logs" / f"{made.name}.tests.txt")
    package = rattler_build.Package.from_file(made)
    try:
        results = package.run_tests(channel=_channels(where, base), progress_callback=log)
    except rattler_build.RattlerBuildError as error:
        raise BuildError(f"{made.name}: its tests do not run: {error}\n{log.tail()}") from None
    for result in results:
        if not result.success:
            raise BuildError(f"{made.name}: its test fails:\n{log.tail()}\n(all of it: {log.path})")
    return made


def _channels(where: Folders, base: Base) -> list[str]:
    return [where.staged.as_uri(), *base.channels]


class _Log:
    """Takes what the builder says, for a file and for the message of an error."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.file = path.open("w")
        for stream in (1, 2):
            os.dup2(self.file.fileno(), stream)
        self.lines: list[str] = []

    def on_log(self, event: LogEvent) -> None:
        """A line of the builder or of what it runs."""
        self.line(event.message)

    def on_build_step(self, event: BuildStepEvent) -> None:
        """The builder begins something."""
        self.line(f"== {event.step_name}: {event.message}")

    def on_download_start(self, event: DownloadStartEvent) -> None:
        """A package is fetched."""

    def on_download_progress(self, event: DownloadProgressEvent) -> None:
        """Some of it is there."""

    def on_download_complete(self, event: DownloadCompleteEvent) -> None:
        """All of it is there."""
        self.line(f"fetched {event.url}")

    def line(self, text: str) -> None:
        """Keep a line."""
        self.lines.append(text)
        self.file.write(text + "\n")
        self.file.flush()

    def tail(self) -> str:
        """The last lines."""
        return "\n".join(self.lines[-_TAIL:])
