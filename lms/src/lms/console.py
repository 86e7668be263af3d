"""Where LMS speaks to people: stderr, one line at a time, because stdout belongs to the script that it runs."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Print `text` as one line from lms."""
    print(f"lms: {' '.join(text.split())}", file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Print a warning as one line from lms: something that was asked for has no effect."""
    say(f"warning: {text}")
