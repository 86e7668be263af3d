"""What can go wrong before the program runs: one base, and one class for each thing that a user can do about it."""

from __future__ import annotations


class LaunchError(Exception):
    """Base of every error that ddlrun raises on purpose. `exit_status` is what the command line returns for it."""

    exit_status = 1


class UsageError(LaunchError, ValueError):
    """The command line is wrong: the message names the option, what was given, and what is allowed."""

    exit_status = 2


class CheckError(LaunchError):
    """The machine is not fit for what was asked. Each of `lines` is one failure: asked, found, what to do."""

    exit_status = 3

    def __init__(self, *lines: str) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines
