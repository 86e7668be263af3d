"""What each framework offers to run a script with large model support."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Protocol

from lms.core.link import Link
from lms.options import Options
from lms.target import Target, framework_of
from lms.trace import Trace


class Launcher(Protocol):
    """A framework's way to run a script with large model support."""

    def run(
        self,
        target: Target,
        options: Options,
        *,
        trace: Path | None = None,
        report: Path | None = None,
        perfetto: Path | None = None,  # PyTorch's alone, as is `stats`
        stats: Path | None = None,
    ) -> int:
        """Run it and write the files that are asked for; the exit status."""

    def record(self, target: Target, options: Options) -> tuple[int, Trace | None, Link | None]:
        """Run it until a step was recorded; the exit status so far, the step, the link."""


def launcher_of(target: Target) -> Launcher:
    """That of the framework which the target trains with. It is imported now."""
    launcher: Launcher = import_module(f"lms.{framework_of(target)}.launcher")
    return launcher
