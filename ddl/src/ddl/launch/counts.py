"""Whole numbers as people write them on a command line, in a file or in an environment."""

from __future__ import annotations

from collections.abc import Iterable

MOST = 1 << 20  # libddl's limit of ranks, and so a limit of everything that is counted here


def whole(text: str, most: int = MOST, least: int = 1) -> int:
    """A whole number from `least` to `most`. Raises ValueError, which says what was expected."""
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
    """`text` in quotes for a message; a long text is cut."""
    return repr(text) if len(text) <= 100 else f"{text[:90]!r}... ({len(text):,} characters)"


def parse_runs(text: str) -> tuple[int, ...]:
    """Numbers and runs of them, as the kernel lists CPUs: `0-2,8` is 0 1 2 8. Raises ValueError."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        low, dash, high = part.partition("-")
        numbers += range(int(low), int(high if dash else low) + 1)
    return tuple(numbers)


def format_runs(numbers: Iterable[int]) -> str:
    """The inverse of `parse_runs`: `0-3,7`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
