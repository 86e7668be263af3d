"""Sizes as people write them: `12GB` (decimal), `12GiB` (binary), or a plain number of bytes."""

from __future__ import annotations

import re

from lms.errors import UsageError

_DECIMAL = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS = _DECIMAL | {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_MOST = 1 << 62  # bytes: beyond any address, and sums of two still fit into 64 bits
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([A-Za-z]*)\s*")


def parse_size(value: object, argument: str, *, zero: bool = False) -> int:
    """Bytes that `value` stands for.

    `argument` is the name the caller's user gave it under; it goes into the error. `zero` allows 0.

    Raises UsageError for an unknown unit, something that is no number, a negative size, one above 2**62 bytes, or zero
    if it is refused.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise _refused(value, argument, zero)
    if isinstance(value, int):
        nbytes = value
    else:
        match = _SIZE.fullmatch(value)
        if match is None or match[2].upper() not in _UNITS:
            raise _refused(value, argument, zero)
        size = float(match[1]) * _UNITS[match[2].upper()]
        if size > _MOST:
            raise _refused(value, argument, zero)
        nbytes = int(size)
    if not 0 <= nbytes <= _MOST or (nbytes == 0 and not zero):
        raise _refused(value, argument, zero)
    return nbytes


def format_size(nbytes: float) -> str:
    """`nbytes` for a person, in decimal units with three significant digits: `910 MB`, `1.25 GB`."""
    sign, size = ("-" if nbytes < 0 else ""), abs(nbytes)
    if size < 999.5:
        return f"{sign}{size:.0f} B"
    for unit in ("KB", "MB", "GB"):
        size /= 1000
        if size < 999.5:
            return f"{sign}{size:.3g} {unit}"
    return f"{sign}{size / 1000:.3g} TB"


def _refused(value: object, argument: str, zero: bool) -> UsageError:
    least = "zero or more" if zero else "more than zero"
    return UsageError(
        f"{argument}={value!r}: expected a size of {least} and at most 2**62 bytes, as bytes or with a unit: "
        "KB, MB, GB, TB (decimal) or KiB, MiB, GiB, TiB (binary), such as '12GB'"
    )


def plural(count: int, noun: str) -> str:
    """`1 step`, `2 steps`, `2 passes`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{'es' if noun.endswith('s') else 's'}"
