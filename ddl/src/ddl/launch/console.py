"""Where ddlrun speaks to people: stderr, one line at a time, because stdout belongs to the program that it runs."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Print `text` as one line from ddlrun."""
    _print(f"ddlrun: {' '.join(text.split())}")


def warn(text: str) -> None:
    """Print a warning as one line from ddlrun: the job runs, but not as somebody might expect."""
    say(f"warning: {text}")


def echo(command: str) -> None:
    """Print the command that is run, as the original did: after a plus, ready to be copied."""
    _print(f"+ {command}")


def _print(line: str) -> None:
    if sys.stderr is not None:  # closed by our caller: print would take stdout instead
        print(line, file=sys.stderr, flush=True)
