"""ddlrun's messages: to stderr, one line at a time, because stdout belongs to the program that it runs.

A message that cannot be written (a closed pipe, a full disk) does not end a job and does not change its exit status.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TextIO

from ddl.launch.errors import LaunchError


def say(text: str) -> None:
    """Print `text` as one line from ddlrun."""
    _tell(f"ddlrun: {' '.join(text.split())}")


def warn(text: str) -> None:
    """Print a warning as one line from ddlrun: the job runs, but perhaps not as expected."""
    say(f"warning: {text}")


def echo(command: str) -> None:
    """Print the command that is run, after a plus as the original did, ready to be copied."""
    _tell(f"+ {command}")


def show(text: str) -> None:
    """Print `text` to stdout: the answer to --help, --dry-run, doctor, plan and the like.

    Raises LaunchError if it cannot be written. A reader that has left (a pager, head) is no error.
    """
    try:
        _print(text.rstrip("\n"), sys.stdout)
    except BrokenPipeError:
        pass
    except OSError as error:
        raise LaunchError(f"stdout could not be written: {error.strerror}") from None


def _tell(line: str) -> None:
    with suppress(OSError):
        _print(line, sys.stderr)


def _print(line: str, stream: TextIO | None) -> None:
    if stream is None:  # closed by our caller: print would take stdout instead
        return
    encoding = stream.encoding or "utf-8"
    line = line.encode(encoding, "backslashreplace").decode(encoding)  # LANG may name one without every character
    try:
        print(line, file=stream, flush=True)
    except OSError:
        # Python keeps what it could not write, would fail again at exit, and would then return 120.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        raise
