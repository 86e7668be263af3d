"""What the kernel tells in files of /proc and /sys. `root` holds `proc` and `sys`; tests give a folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple


class Mount(NamedTuple):
    """A mounted file system, as this process sees it."""

    number: str  # MAJOR:MINOR of its device
    part: str  # the folder of the file system that is mounted
    point: str
    kind: str
    source: str
    options: str


def contents(path: Path) -> str:
    """The text of one of the kernel's files; empty if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""


def stated(text: str, name: str) -> int:
    """Bytes that a line of `text`, such as /proc/meminfo, states; 0 if there is none."""
    found = re.search(rf"\b{name}:\s+(\d+) kB", text)
    return int(found[1]) * 1024 if found else 0


def mounts(root: Path) -> list[Mount]:
    """The mounts in their order; none if the kernel does not tell."""
    found = []
    for line in contents(root / "proc/self/mountinfo").splitlines():
        mount, _, filesystem = line.partition(" - ")
        number, part, point = mount.split(" ")[2:5]
        found.append(Mount(number, _unescaped(part), _unescaped(point), *filesystem.split(" ", 2)))
    return found


def _unescaped(path: str) -> str:
    """Space, tab, newline and backslash are octal numbers in mountinfo."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), path)
