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

    Each of `failures` has a subject (what was checked) and a text: what was asked, what was found, what to do. `lines`
    joins the two.
    """

    exit_status = 3

    def __init__(self, *failures: tuple[str, str]) -> None:
        self.failures = failures
        self.lines = tuple(f"{subject}: {text}" for subject, text in failures)
        super().__init__("\n".join(self.lines))
