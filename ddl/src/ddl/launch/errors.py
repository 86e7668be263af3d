"""Errors before the program runs: one base, and a class for each kind of remedy."""

from __future__ import annotations


class LaunchError(Exception):
    """Base of every error that ddlrun raises on purpose. `exit_status` is the exit status of the command."""

    exit_status = 1


class UsageError(LaunchError, ValueError):
    """The command line is wrong: the message names the option, what was given, and what is allowed."""

    exit_status = 2


class CheckError(LaunchError):
    """The machine cannot run what was asked.

    `subject` is what was checked; `text` says what was asked, what was found, and what to do. `others` are more of such
    failures; `lines` has a line for each.
    """

    exit_status = 3

    def __init__(self, subject: str, text: str, *others: tuple[str, str]) -> None:
        self.failures = ((subject, text), *others)
        self.lines = tuple(f"{subject}: {text}" for subject, text in self.failures)
        super().__init__("\n".join(self.lines))
