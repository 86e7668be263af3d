"""ddlrun's messages: to stderr, one line at a time, because stdout belongs to the program that it runs.

A closed pipe or a full disk does not end a job and does not change its exit status.
"""

from __future__ import annotations

import os
import sys
from typing import TextIO


def say(text: str) -> None:
    """Print `text` as one line from ddlrun."""
    _print(f"ddlrun: {' '.join(text.split())}", sys.stderr)


def warn(text: str) -> None:
    """Print a warning as one line from ddlrun: the job runs, but perhaps not as expected."""
    say(f"warning: {text}")


def echo(command: str) -> None:
    """Print the command that is run, after a plus as the original did, ready to be copied."""
    _print(f"+ {command}", sys.stderr)


def show(text: str) -> None:
    """Print `text` to stdout: the answer to --help, --dry-run, doctor and the like."""
    _print(text, sys.stdout)


def _print(line: str, stream: TextIO | None) -> None:
    if stream is None:  # closed by our caller: print would take stdout instead
        return
    try:
        print(line, file=stream, flush=True)
    except OSError:
        # Python keeps what it could not write, would fail again at exit, and would then return 120.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
