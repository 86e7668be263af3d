"""The wheels that the stand-in channel is made of: pip resolves them by the project's pins, and fetches them once."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bundle import lock
from bundle.errors import ToolError
from bundle.folders import write
from bundle.pip import command
from bundle.progress import say


def download(names: Iterable[str], constraints: Path, folder: Path) -> list[Path]:
    """The wheels of `names` and of all they need, in `folder`; nothing is asked of an index while the request is old.

    Two runs on one folder take turns. Raises ToolError with pip's own words where pip cannot serve it.
    """
    with lock.held(folder):
        return _download(sorted(names), constraints, folder)


def _download(wanted: list[str], constraints: Path, folder: Path) -> list[Path]:
    pins = _pins(constraints)
    python = f"{sys.implementation.cache_tag} {sys.base_prefix}"
    record = folder / f"{hashlib.sha256(' '.join(wanted).encode()).hexdigest()[:16]}.json"
    if record.exists():
        old = json.loads(record.read_text())
        files = [folder / name for name in old["files"]]
        # A pin of what is not among them is of no account.
        same = old.get("python") == python and old["pins"] == {name: pins.get(name) for name in old["pins"]}
        if same and all(file.exists() for file in files):
            return files
    begun = time.monotonic()
    report = record.with_suffix(".report")
    pip = command(Path(sys.executable))
    resolve = [*pip, "install", "--dry-run", "--ignore-installed", "--quiet", "--report", str(report)]
    _run([*resolve, "--only-binary", ":all:", "--constraint", str(constraints), *wanted])
    # By address and without resolving again; what is in the folder already is not fetched, if it has its checksum.
    installed = json.loads(report.read_text())["install"]
    resolved = [_address(item["download_info"]) for item in installed]
    _run([*pip, "download", "--quiet", "--no-deps", "--dest", str(folder), *resolved])
    report.unlink()
    files = [folder / url.partition("#")[0].rpartition("/")[2].replace("%2B", "+") for url in resolved]
    for file in files:
        if not file.is_file():
            raise ToolError(f"pip was asked for {file.name} and reported no error, but it is not in {folder}")
    named = sorted(canonicalize_name(item["metadata"]["name"]) for item in installed)
    noted = {"python": python, "pins": {name: pins.get(name) for name in named}, "files": [file.name for file in files]}
    write(record, json.dumps(noted, indent=1))
    say(f"wheels: done in {time.monotonic() - begun:.1f} s")
    return files


def _address(download: Mapping[str, Any]) -> str:
    """Of a wheel in pip's report, with its checksum where the index has told it."""
    address = str(download["url"]).partition("#")[0]
    checksum = download.get("archive_info", {}).get("hashes", {}).get("sha256")
    return f"{address}#sha256={checksum}" if checksum else address


def _pins(constraints: Path) -> dict[str, str]:
    """By canonical name, as the file says them."""
    lines = (line.partition("#")[0].strip() for line in constraints.read_text().splitlines())
    found = map(Requirement, filter(None, lines))
    return {str(canonicalize_name(one.name)): str(one.specifier) for one in found}


def _run(arguments: list[str]) -> None:
    done = subprocess.run(arguments, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if not line.startswith("WARNING")]
        raise ToolError("pip could not get the wheels of the stand-in channel:\n" + "\n".join(lines[-20:]))
