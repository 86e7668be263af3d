"""Whole numbers as people write them on a command line, in a file or in an environment."""

from __future__ import annotations

MOST = 1 << 20  # ranks of a job, and so of all that is counted: libddl's own limit


def whole(text: str, most: int = MOST, least: int = 1) -> int:
    """A whole number from `least` to `most`. Raises ValueError, whose message says what was expected."""
    digits = text.lstrip("0") or "0"
    if not text or not text.isascii() or not digits.isdigit():
        raise ValueError(f"expected a whole number, {least} or more")
    # Python itself raises an error for more than 4,300 digits.
    number = int(digits) if len(digits) <= len(str(most)) else most + 1
    if number < least:
        raise ValueError(f"expected a whole number, {least} or more")
    if number > most:
        raise ValueError(f"expected a whole number, at most {most:,}")
    return number


def quoted(text: str) -> str:
    """`text` in quotes for a message; what is longer than a line is cut."""
    return repr(text) if len(text) <= 100 else f"{text[:90]!r}... ({len(text):,} characters)"
