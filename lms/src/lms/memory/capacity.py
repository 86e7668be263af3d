"""How much memory this process may use: all of the machine's, or as much as its control group allows."""

from __future__ import annotations

from pathlib import Path

from lms.memory.proc import contents, mounts, stated


def memory_capacity(root: Path = Path("/")) -> int:
    """Bytes of memory that this process may use: the machine's, or less if a control group says so.

    `root` holds `proc` and the mount points; tests give a folder.
    """
    total = stated((root / "proc/meminfo").read_text(), "MemTotal")
    limits = [limit for limit in _group_limits(root) if limit > 0]
    return min([total, *limits]) if total else min(limits)


def _group_limits(root: Path) -> list[int]:
    """The memory limits of this process's control group and of all groups above it, of versions 1 and 2."""
    paths: dict[str, str] = {}  # file in which a version keeps its limit -> this process's group
    for line in contents(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths["memory.max"] = path
        elif "memory" in controllers.split(","):
            paths["memory.limit_in_bytes"] = path
    limits: list[int] = []
    for mount in mounts(root):
        name = {"cgroup2": "memory.max", "cgroup": "memory.limit_in_bytes"}.get(mount.kind)
        if name not in paths or (mount.kind == "cgroup" and "memory" not in mount.options.split(",")):
            continue
        path = paths[name]
        # Inside a container the mount shows only a part of the tree, and the group's path may be told from outside it.
        part = mount.part.rstrip("/")
        below = path[len(part) :] if (path + "/").startswith(part + "/") else ""
        top = root / mount.point.lstrip("/")
        group = top / below.strip("/")
        if ".." in group.parts:  # the process was moved out of its namespace's root
            group = top
        for folder in (group, *group.parents):
            text = contents(folder / name).strip()
            if text.isdigit():  # "max" is none
                limits.append(int(text))
            if folder == top:
                break
    return limits
