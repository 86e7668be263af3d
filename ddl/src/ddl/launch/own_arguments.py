"""The arguments of this process, as `ps` shows them to every user of the host."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ddl.launch.options import Export


def mask(exports: Iterable[Export]) -> None:
    """Write asterisks over the values of secret variables. Until then, a few hundredths of a second, they are shown."""
    with suppress(OSError, IndexError, ValueError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, which proc(5) counts as 48 and 49
        shown = Path("/proc/self/cmdline").read_bytes()
        if len(shown) != end - start or ctypes.string_at(start, len(shown)) != shown:
            return
        for one in exports:
            if one.secret and one.value:
                value = os.fsencode(one.value)
                word = os.fsencode(f"{one.name}=") + value + b"\0"
                at = shown.find(word)
                while at >= 0:
                    ctypes.memset(start + at + len(word) - 1 - len(value), ord("*"), len(value))
                    at = shown.find(word, at + 1)
