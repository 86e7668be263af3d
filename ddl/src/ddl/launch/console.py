"""Where ddlrun speaks to people: stderr, one line at a time, because stdout belongs to the program that it runs.

Nobody has to read it. A pipe that is closed, or a disk that is full, ends no job and changes no exit status.
"""

from __future__ import annotations

import os
import sys
from typing import TextIO


def say(text: str) -> None:
    """Print `text` as one line from ddlrun."""
    _print(f"ddlrun: {' '.join(text.split())}", sys.stderr)


def warn(text: str) -> None:
    """Print a warning as one line from ddlrun: the job runs, but not as somebody might expect."""
    say(f"warning: {text}")


def echo(command: str) -> None:
    """Print the command that is run, as the original did: after a plus, ready to be copied."""
    _print(f"+ {command}", sys.stderr)


def show(text: str) -> None:
    """Print `text` to stdout: what was asked for in place of a job."""
    _print(text, sys.stdout)


def _print(line: str, stream: TextIO | None) -> None:
    if stream is None:  # closed by our caller: print would take stdout instead
        return
    try:
        print(line, file=stream, flush=True)
    except OSError:
        # What could not be written is kept, and Python would return 120 when it fails again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
