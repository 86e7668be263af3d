"""How much memory this process may use: all of the machine's, or as much as its control group allows."""

from __future__ import annotations

from pathlib import Path


def memory_capacity(root: Path = Path("/")) -> int:
    """Bytes of memory that this process may use: the machine's, or less if a control group says so.

    `root` holds `proc` and the mount points; tests give a folder.
    """
    total = 0
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            total = int(line.split()[1]) * 1024
    limits = [limit for limit in _group_limits(root) if limit > 0]
    return min([total, *limits]) if total else min(limits)


def _group_limits(root: Path) -> list[int]:
    """The memory limits of this process's control group and of all groups above it, of versions 1 and 2."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return []
    paths: dict[str, str] = {}  # file in which a version keeps its limit -> this process's group
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths["memory.max"] = path
        elif "memory" in controllers.split(","):
            paths["memory.limit_in_bytes"] = path
    limits: list[int] = []
    for line in mounts:
        fields, _, rest = line.partition(" - ")
        kind, _, options = rest.split(" ", 2)
        name = {"cgroup2": "memory.max", "cgroup": "memory.limit_in_bytes"}.get(kind)
        if name not in paths or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        inner, point = (_unescape(field) for field in fields.split()[3:5])
        path = paths[name]
        # Inside a container the mount shows only a part of the tree, and the group's path may be told from outside it.
        below = path[len(inner.rstrip("/")) :] if (path + "/").startswith(inner.rstrip("/") + "/") else ""
        top = root / point.lstrip("/")
        group = top / below.strip("/")
        if ".." in group.parts:  # the process was moved out of its namespace's root
            group = top
        for folder in (group, *group.parents):
            text = _read(folder / name)
            if text.isdigit():  # "max" is none
                limits.append(int(text))
            if folder == top:
                break
    return limits


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _unescape(field: str) -> str:
    """A path of mountinfo, in which space, tab, newline and backslash are octal numbers."""
    for code, letter in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, letter)
    return field
