"""The bill of materials of an environment that was solved, as `bascule sbom` makes it of an installed one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement
from rattler import RepoDataRecord

from bascule.inventory import Package
from bascule.sbom import document
from bundle.folders import write as write_text


def write(name: str, packages: Sequence[Package], path: Path, pip: Sequence[str] = ()) -> None:
    """CycloneDX 1.6 for the environment `name` of these packages, as `path`.

    What the user's own pip step would bring, and did not, stands in it as optional.
    """
    there = {(package.manager, package.name.lower()) for package in packages}
    left = [one for one in map(_of_pip, pip) if (one.manager, one.name.lower()) not in there]
    ordered = sorted(packages, key=lambda package: (package.name, package.manager))
    write_text(path, json.dumps(document(name, ordered, optional=left), indent=1) + "\n")


def _of_pip(line: str) -> Package:
    requirement = Requirement(line)
    pinned = [one.version for one in requirement.specifier if one.operator == "=="]
    return Package(requirement.name, pinned[0] if pinned else "", "", "pip", "", "", (), "", "")


def of_conda(record: RepoDataRecord) -> Package:
    """A package as the solver gives it."""
    return Package(
        name=record.name.normalized,
        version=str(record.version),
        build=str(record.build),
        manager="conda",
        license=record.license or "",
        channel=str(record.channel or ""),
        depends=tuple(record.depends),
        sha256=record.sha256.hex() if record.sha256 else "",
        file=record.file_name,
    )


def explicit(name: str, platform: str, records: Sequence[RepoDataRecord]) -> str:
    """A lock file, which `conda create --file` installs without solving: each package by its address and MD5.

    Source: conda's documentation, "Building identical conda environments".
    """
    lines = [f"# {name} for {platform}: conda create --name NAME --file THIS_FILE", "@EXPLICIT"]
    by_name = {record.name.normalized: record for record in records}
    # What is sorted has lost its address.
    for record in (by_name[one.name.normalized] for one in RepoDataRecord.sort_topologically(list(records))):
        lines.append(f"{record.url}#{record.md5.hex()}" if record.md5 else str(record.url))
    return "\n".join(lines) + "\n"
