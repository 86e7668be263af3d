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

from bundle import interpreter
from bundle.errors import BundleError
from bundle.folders import write
from bundle.process import say


def download(names: Iterable[str], constraints: Path, folder: Path) -> list[Path]:
    """The wheels of `names` and of all they need, in `folder`; nothing is asked of an index while the request is old.

    Raises BundleError with pip's own words if pip cannot serve it.
    """
    wanted = sorted(names)
    folder.mkdir(parents=True, exist_ok=True)
    asked = json.dumps([wanted, constraints.read_text(), sys.implementation.cache_tag, sys.base_prefix])
    record = folder / f"{hashlib.sha256(asked.encode()).hexdigest()[:16]}.json"
    if record.exists():
        files = [folder / name for name in json.loads(record.read_text())]
        if all(file.exists() for file in files):
            return files
    begun = time.monotonic()
    report = record.with_suffix(".report")
    pip = interpreter.pip(Path(sys.executable))
    resolve = [*pip, "install", "--dry-run", "--ignore-installed", "--quiet", "--report", str(report)]
    _run([*resolve, "--only-binary", ":all:", "--constraint", str(constraints), *wanted])
    # By address and without resolving again; what is in the folder already is not fetched, if it has its checksum.
    resolved = [_address(item["download_info"]) for item in json.loads(report.read_text())["install"]]
    _run([*pip, "download", "--quiet", "--no-deps", "--dest", str(folder), *resolved])
    report.unlink()
    files = [folder / url.partition("#")[0].rpartition("/")[2].replace("%2B", "+") for url in resolved]
    for file in files:
        if not file.is_file():
            raise BundleError(f"pip was asked for {file.name} and reported no error, but it is not in {folder}")
    write(record, json.dumps([file.name for file in files]))
    say(f"wheels: done in {time.monotonic() - begun:.1f} s")
    return files


def _address(download: Mapping[str, Any]) -> str:
    """Of a wheel in pip's report, with its checksum where the index has told it."""
    address = str(download["url"]).partition("#")[0]
    checksum = download.get("archive_info", {}).get("hashes", {}).get("sha256")
    return f"{address}#sha256={checksum}" if checksum else address


def _run(arguments: list[str]) -> None:
    done = subprocess.run(arguments, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if not line.startswith("WARNING")]
        raise BundleError("pip could not get the wheels of the stand-in channel:\n" + "\n".join(lines[-20:]))
