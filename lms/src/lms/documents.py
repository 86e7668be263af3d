"""JSON documents that come from outside: each value is of its type and within its range, or an error names its place.

Every function raises ValueError. `where` is the value's place in the document, such as `records[3].nbytes`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from reprlib import repr as shortened
from typing import TypeVar
from unicodedata import category

C = TypeVar("C")

MOST_BYTES = 1 << 48  # of any one size: sums, and batches thousands of times as large, still fit into 64 bits
MOST_SECONDS = 1e9
RATES = (1.0, 1e18)  # bytes a second


def parse(content: str) -> object:
    """What the text says."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def mapping(value: object, where: str) -> dict[str, object]:
    """An object."""
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected an object, found {shortened(value)}")
    return value


def items(value: object, where: str) -> list[object]:
    """A list."""
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{where}: expected a list, found {shortened(value)}")
    return list(value)


def text(value: object, where: str) -> str:
    """Text that can be printed: no half characters (lone surrogates), and none that control a terminal."""
    if not isinstance(value, str) or not (value.isprintable() or all(map(_is_harmless, value))):
        raise ValueError(f"{where}: expected a text, found {shortened(value)}")
    return value


def texts(value: object, where: str) -> dict[str, str]:
    """An object of texts."""
    return {text(key, where): text(one, f"{where}.{key}") for key, one in mapping(value, where).items()}


def flag(value: object, where: str) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise ValueError(f"{where}: expected true or false, found {shortened(value)}")
    return value


def choice(value: object, allowed: tuple[C, ...], where: str) -> C:
    """One of the values that are allowed."""
    for one in allowed:
        if value == one:
            return one
    raise ValueError(f"{where}: expected one of {', '.join(map(repr, allowed))}, found {shortened(value)}")


def whole(value: object, where: str, most: int, least: int = 0) -> int:
    """A whole number from `least` to `most`."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{where}: expected a whole number from {least} to {most}, found {shortened(value)}")
    return value


def nbytes(value: object, where: str, least: int = 0) -> int:
    """A size in bytes."""
    return whole(value, where, MOST_BYTES, least)


def number(value: object, where: str, least: float, most: float) -> float:
    """A number from `least` to `most`."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{where}: expected a number from {least:g} to {most:g}, found {shortened(value)}")
    return float(value)


def seconds(value: object, where: str, least: float = 0.0) -> float:
    """A time in seconds."""
    return number(value, where, least, MOST_SECONDS)


def rate(value: object, where: str) -> float:
    """A rate in bytes a second."""
    return number(value, where, *RATES)


def only(document: Mapping[str, object], names: set[str], where: str = "") -> None:
    """Refuse fields other than `names`."""
    if unknown := sorted(document.keys() - names):
        raise ValueError(f"{where}{': ' if where else ''}unknown field {shortened(unknown[0])}")


def _is_harmless(letter: str) -> bool:
    return letter in "\n\t" or category(letter) not in ("Cc", "Cs")
