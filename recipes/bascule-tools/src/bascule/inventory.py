"""What an environment holds: the packages of conda by conda-meta, those of pip and its like by their metadata."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Set
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

_METADATA = re.compile(r"(.*/site-packages/[^/]+\.(?:dist|egg)-info)(?:/|$)")


class InventoryError(RuntimeError):
    """The environment cannot be read. The message says what to do."""


@dataclass(frozen=True)
class Package:
    """One installed package."""

    name: str
    version: str
    build: str  # of conda; "" for pip
    manager: str  # "conda"; "pip" for whatever else installs wheels, too: uv, Poetry
    license: str  # as the package says it; "" where it says nothing
    channel: str  # where it came from; "" for pip
    depends: tuple[str, ...]  # requirements as the package writes them
    sha256: str  # of the file that it came in; "" where it is not recorded
    file: str  # of that file; "" for pip


def read(prefix: Path) -> list[Package]:
    """All packages of the environment at `prefix`, by name. Raises InventoryError if there is none."""
    records = prefix / "conda-meta"
    if not records.is_dir() and not any(prefix.glob("lib/python3.*/site-packages")):
        raise InventoryError(
            f"{prefix} is no environment (it has neither conda-meta nor site-packages): name one with --prefix"
        )
    known = [_record(path) for path in sorted(records.glob("*.json"))]
    owned = {at[1] for one in known for file in one.files if (at := _METADATA.match(file))}
    found = [*(one.package for one in known), *_of_pip(prefix, owned)]
    return sorted(found, key=lambda package: (package.name, package.manager))


@dataclass(frozen=True)
class _Record:
    """What conda knows of a package that is installed."""

    package: Package
    files: tuple[str, ...]  # below the environment


def _record(path: Path) -> _Record:
    try:
        record = json.loads(path.read_text())
        package = Package(
            name=record["name"],
            version=record["version"],
            build=record.get("build", ""),
            manager="conda",
            license=str(record.get("license") or ""),
            channel=str(record.get("channel") or ""),
            depends=tuple(record.get("depends", ())),
            sha256=str(record.get("sha256") or ""),
            file=str(record.get("fn") or ""),
        )
        return _Record(package, tuple(record.get("files", ())))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InventoryError(f"{path} is no record of a package ({error}): reinstall that package") from None


def _of_pip(prefix: Path, owned: Set[str]) -> Iterator[Package]:
    """Those whose metadata is none of `owned`, which came in conda packages, whose builds ran pip."""
    # conda-forge's Pythons have lib/python3.1 as a link to their folder: each is read once, by its own name.
    libraries = [path for path in sorted(prefix.glob("lib/python3.*")) if not path.is_symlink()]
    folders = [str(path / "site-packages") for path in libraries if (path / "site-packages").is_dir()]
    for distribution in metadata.distributions(path=folders):
        said = distribution.metadata
        folder = getattr(distribution, "_path", None)
        if folder is not None and str(Path(folder).relative_to(prefix)) in owned:
            continue
        if (distribution.read_text("INSTALLER") or "").strip() == "conda" or not said.get_all("Name"):
            continue  # what is left of a removed one has no name
        yield Package(
            name=str(said["Name"]),
            version=distribution.version,
            build="",
            manager="pip",
            license=license_of(said),
            channel="",
            depends=tuple(distribution.requires or ()),
            sha256="",
            file="",
        )


def license_of(said: metadata.PackageMetadata) -> str:
    """What a distribution's metadata says of its licence: an expression, a name, or the first line of a text."""
    if expression := str((said.get_all("License-Expression") or [""])[0]).strip():
        return expression
    text = str((said.get_all("License") or [""])[0]).strip()
    first = "" if text.upper() == "UNKNOWN" else text.partition("\n")[0]  # setuptools' word for none
    if first == text and 0 < len(first) < 80:
        return first
    classified = [str(line) for line in said.get_all("Classifier") or []]
    names = [line.rpartition("::")[2].strip() for line in classified if line.startswith("License ::")]
    return " AND ".join(name for name in names if name != "OSI Approved") or first


def here() -> Path:
    """The environment that this Python is in."""
    return Path(sys.prefix)
