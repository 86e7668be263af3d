"""This machine: processor, memory, NUMA nodes, kernel and versions, as the kernel reports them.

`root` holds `proc` and `sys`; tests give a folder.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import lms
from lms.memory.capacity import memory_capacity
from lms.memory.proc import contents, stated

ROOT = Path("/")


@dataclass(frozen=True)
class Node:
    """A NUMA node: the processors and the memory that are near each other."""

    index: int
    cpus: tuple[int, ...]  # none for a node that is memory alone
    memory: int  # bytes
    distances: tuple[int, ...]  # to each node, in their order, as the firmware states them: 10 is its own


def nodes(root: Path = ROOT) -> tuple[Node, ...]:
    """The NUMA nodes, in order; a kernel without NUMA has one node of unknown memory."""
    folder = root / "sys/devices/system/node"
    found = []
    for path in sorted(folder.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        distances = tuple(int(word) for word in contents(path / "distance").split())
        memory = stated(contents(path / "meminfo"), "MemTotal")
        found.append(Node(int(path.name[4:]), tuple(_ranges(contents(path / "cpulist"))), memory, distances))
    return tuple(found) or (Node(0, tuple(sorted(os.sched_getaffinity(0))), 0, (10,)),)


def available_memory(root: Path = ROOT) -> int:
    """Bytes that could be taken now without pushing anything out; 0 if the kernel does not say."""
    return stated(contents(root / "proc/meminfo"), "MemAvailable")


def memory_room(share: float) -> int:
    """`share` of the memory that could be taken now, or of the control group's limit if that is less; bytes."""
    return int(min(available_memory(), memory_capacity()) * share)


def last_cache(cpus: Iterable[int], root: Path = ROOT) -> int:
    """Bytes that the last caches of `cpus` hold together; 0 if the kernel does not say."""
    caches: dict[str, int] = {}  # by the processors that share it
    for cpu in cpus:
        found = []
        for path in (root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index[0-9]*"):
            level, size = contents(path / "level").strip(), re.fullmatch(r"(\d+)K", contents(path / "size").strip())
            if level.isdigit() and size:
                found.append((int(level), int(size[1]) * 1024, contents(path / "shared_cpu_list").strip()))
        if found:
            _, nbytes, shared = max(found)
            caches[shared] = nbytes
    return sum(caches.values())


def processor(root: Path = ROOT) -> str:
    """The processor's name, as /proc/cpuinfo spells it on x86, POWER and (if it does) on Arm."""
    text = contents(root / "proc/cpuinfo")
    for key in ("model name", "cpu", "Processor"):
        if match := re.search(rf"^{key}\s*:\s*(.+)$", text, re.MULTILINE):
            return match[1].strip()
    return platform.machine()


def hypervisor(root: Path = ROOT) -> bool | None:
    """Whether this is a virtual machine, as far as its processor tells; None if it never tells (Arm, POWER)."""
    flags = re.search(r"^flags\s*:(.*)$", contents(root / "proc/cpuinfo"), re.MULTILINE)
    return None if flags is None else "hypervisor" in flags[1].split()


def kernel() -> str:
    """The first two numbers of its version: what figures may depend on, and not which build of it a host runs."""
    found = re.match(r"\d+\.\d+", platform.release())
    return found[0] if found else "not known"


def machine(root: Path = ROOT) -> dict[str, str]:
    """Facts about the machine and the versions, for readers of its figures."""
    facts = {
        "host": platform.node(),
        "processor": f"{len(os.sched_getaffinity(0))} x {processor(root)}",
        "virtual": {True: "yes", False: "no", None: "not known"}[hypervisor(root)],
        "NUMA nodes": str(len(nodes(root))),
        "kernel": kernel(),
        "Python": platform.python_version(),
        "lms": lms.__version__,
        "numpy": _version("numpy"),
    }
    if torch := _version("torch"):
        facts["torch"] = torch
    return facts


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _ranges(text: str) -> list[int]:
    """The numbers of a list as the kernel writes it: `0-3,8`."""
    numbers: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    return numbers
