"""Where LMS speaks to people: stderr, one line at a time, because stdout belongs to the script that it runs."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from lms.ranks import rank_of


def open_closed_streams() -> None:
    """Open those of stdin, stdout and stderr that a daemon has closed, on /dev/null.

    The next files would take their numbers otherwise, and what C code prints would go into them.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode)  # noqa: SIM115 - it stays open
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


def say(text: str) -> None:
    """Print `text` as one line from lms; of several ranks, each says which it is."""
    rank = rank_of(os.environ)
    who = "lms: " if rank is None else f"lms: rank {rank}: "
    _write(f"{who}{' '.join(text.split())}\n")


def warn(text: str) -> None:
    """Print a warning as one line from lms: something that was asked for has no effect."""
    say(f"warning: {text}")


def show_progress(text: str) -> None:
    """Write on the terminal's last line how far something is; "" clears it. Nothing if stderr is no terminal."""
    if sys.stderr is not None and sys.stderr.isatty():
        _write(f"\r{text}\x1b[K")


def _write(text: str) -> None:
    """Write to stderr, if anyone listens: a reader that has gone, or a full disk, ends no training."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):  # ValueError: the script has closed it
            sys.stderr.write(text)
            sys.stderr.flush()
