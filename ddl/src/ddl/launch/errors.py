"""What can go wrong before the program runs: one base, and one class for each thing that a user can do about it."""

from __future__ import annotations


class LaunchError(Exception):
    """Base of every error that ddlrun raises on purpose. `exit_status` is what the command line returns for it."""

    exit_status = 1


class UsageError(LaunchError, ValueError):
    """The command line is wrong: the message names the option, what was given, and what is allowed."""

    exit_status = 2


class CheckError(LaunchError):
    """The machine is not fit for what was asked.

    Each of `failures` is a subject (what was looked at) and a text: asked, found, what to do. `lines` are both in one.
    """

    exit_status = 3

    def __init__(self, *failures: tuple[str, str]) -> None:
        self.failures = failures
        self.lines = tuple(f"{subject}: {text}" for subject, text in failures)
        super().__init__("\n".join(self.lines))
