"""Sizes, rates and times in text. Rates are bits a second (`200mbit`) or bytes a second (`12.5GB/s`)."""

from __future__ import annotations

import re

_NUMBER = r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+)\s*"
_VALUE = re.compile(_NUMBER + r"([A-Za-zµ/]*)\s*")
# Real networks lie inside these limits. They keep out JSON's Infinity, integers that no float holds, and infinite
# forecasts.
_LEAST_RATE, _MOST_RATE = 1e-6, 1e18  # bytes a second
_MOST_SECONDS = 1e9
_MOST_SIZE = 2**44  # bytes: the chunks of more take minutes and gigabytes to simulate
_BITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}
_BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BYTES |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_TIMES = {"s": 1.0, "ms": 1e3, "us": 1e6, "µs": 1e6, "ns": 1e9}  # units in a second


def parse_size(text: str) -> int:
    """Bytes of `64MiB`, `1.5GB` or `4096`. Raises ValueError."""
    what = "a size from 1 byte to 16 TiB, such as 64MiB, 1.5GB or a number of bytes"
    number, unit = _split(text, what)
    size = number * (_BYTES.get(unit.lower(), 0) if unit else 1)
    if not 1 <= size <= _MOST_SIZE:
        raise ValueError(f"{text!r}: expected {what}")
    return round(size)


def parse_rate(text: str | float) -> float:
    """Bytes a second of `200mbit`, `10 Gbit/s`, `12.5GB/s` or a number of bytes a second. Raises ValueError."""
    what = "a rate above 0, in bits (200mbit, 10 Gbit/s) or bytes a second (12.5GB/s)"
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        if _LEAST_RATE <= text <= _MOST_RATE:
            return float(text)
        raise ValueError(f"{text!r}: expected {what}")
    number, unit = _split(text, what)
    plain = unit.lower().removesuffix("/s").removesuffix("ps")
    # A number without a unit is refused: it could be bits or bytes, and nobody notices a factor of 8.
    factor = _BITS[plain] / 8 if plain in _BITS else _BYTES.get(plain, 0) if unit.lower().endswith("/s") else 0
    if not _LEAST_RATE <= number * factor <= _MOST_RATE:
        raise ValueError(f"{text!r}: expected {what}")
    return number * factor


def parse_time(text: str | float) -> float:
    """Seconds of `5us`, `0.1 ms` or a number of seconds. Raises ValueError."""
    what = "a time of 0 or more, such as 5us, 0.1ms or 0s"
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        if 0 <= text <= _MOST_SECONDS:
            return float(text)
        raise ValueError(f"{text!r}: expected {what}")
    number, unit = _split(text, what)
    seconds = number / _TIMES.get(unit, 1.0)
    if not seconds <= _MOST_SECONDS or (unit not in _TIMES and not (unit == "" and number == 0)):
        raise ValueError(f"{text!r}: expected {what}")
    return seconds


def format_size(nbytes: float) -> str:
    """Bytes in binary units: `64 MiB`, `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if float(f"{nbytes:.4g}") < 1024 or unit == "PiB":
            break
        nbytes /= 1024
    return f"{nbytes:.4g} {unit}"


def format_bits(rate: float) -> str:
    """A rate, given in bytes a second, as bits a second: `200 Mbit/s`."""
    units = (("Pbit/s", 1e15), ("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3), ("bit/s", 1.0))
    return _scaled(8 * rate, units)


def format_bytes(rate: float) -> str:
    """A rate in bytes a second: `12.5 GB/s`."""
    return _scaled(rate, (("PB/s", 1e15), ("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3), ("B/s", 1.0)))


def format_time(seconds: float) -> str:
    """A time: `5 us`, `1.23 ms`, `4.56 s`."""
    return _scaled(seconds, (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))) if seconds else "0 s"


def _scaled(value: float, units: tuple[tuple[str, float], ...]) -> str:
    name, factor = next(((name, factor) for name, factor in units if value >= 0.9995 * factor), units[-1])
    number = f"{value / factor:.3g}"
    return f"{float(number):g} {name}"


def _split(text: object, what: str) -> tuple[float, str]:
    found = _VALUE.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise ValueError(f"{text!r}: expected {what}")
    return float(found[1]), found[2]
