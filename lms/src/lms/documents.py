"""JSON documents that come from outside: each value is of its type and within its range, or an error names its place.

Every function raises ValueError. `where` names the value's place in the document, such as `records[3].nbytes`.
"""

from __future__ import annotations

import json
from collections import abc
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import cache
from inspect import signature
from reprlib import repr as shortened
from types import UnionType
from typing import Annotated, Literal, TypeVar, get_args, get_origin, get_type_hints
from unicodedata import category

C = TypeVar("C")
D = TypeVar("D")
Reader = Callable[[object, str], object]  # (value, its place)

MOST_BYTES = 1 << 48  # of any one size: sums, and batches thousands of times as large, still fit into 64 bits
MOST_SECONDS = 1e9
RATES = (1.0, 1e18)  # bytes a second

Rate = Annotated[float, RATES]
Some = Annotated[int, (1, MOST_BYTES)]  # bytes, or copies: one at least


def parse(content: str) -> object:
    """The JSON document in `text`."""
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


def read(kind: Callable[..., D], value: object, where: str = "") -> D:
    """The dataclass `kind` from an object with its fields. A field that is missing has its default, or counts as null.

    The types of the fields say what is allowed: bytes for `int`, seconds for `float`, and bounds of their own for
    `Annotated[int, (least, most)]`.
    """
    document, readers = mapping(value, where or "document"), _readers(kind)
    only(document, set(readers), where)
    return kind(
        **{
            name: reader(document.get(name), f"{where}.{name}" if where else name)
            for name, (reader, required) in readers.items()
            if required or name in document
        }
    )


@cache
def _readers(kind: Callable[..., object]) -> dict[str, tuple[Reader, bool]]:
    """For each field how it is read, and whether it must be there."""
    hints = get_type_hints(kind, include_extras=True)
    needed = signature(kind).parameters.items()
    return {name: (_reader(hints[name]), parameter.default is parameter.empty) for name, parameter in needed}


def _reader(hint: object) -> Reader:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        hint, (least, most) = inner
        if hint is int:
            return lambda value, where: whole(value, where, most, least)
        return lambda value, where: number(value, where, least, most)
    if origin is Literal:
        return lambda value, where: choice(value, inner, where)
    if origin is UnionType:  # or None
        one = _reader(inner[0])
        return lambda value, where: None if value is None else one(value, where)
    if origin is tuple:
        one = _reader(inner[0])
        return lambda value, where: tuple(one(each, f"{where}[{at}]") for at, each in enumerate(items(value, where)))
    if origin is abc.Mapping:
        one = _reader(inner[1])
        return lambda value, where: {
            text(key, where): one(each, f"{where}.{key}") for key, each in mapping(value, where).items()
        }
    if is_dataclass(hint):
        return lambda value, where: read(hint, value, where)  # type: ignore[arg-type]
    plain: dict[object, Reader] = {int: nbytes, float: seconds, str: text, bool: flag, object: lambda value, _: value}
    return plain[hint]


def only(document: Mapping[str, object], names: set[str], where: str = "") -> None:
    """Refuse fields other than `names`."""
    if unknown := sorted(document.keys() - names):
        raise ValueError(f"{where}{': ' if where else ''}unknown field {shortened(unknown[0])}")


def _is_harmless(letter: str) -> bool:
    return letter in "\n\t" or category(letter) not in ("Cc", "Cs")
