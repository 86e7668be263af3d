"""The bill of materials of an environment that was solved, as `bascule sbom` makes it of an installed one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from packaging.requirements import Requirement
from rattler import RepoDataRecord

from bascule.inventory import Package
from bascule.sbom import document
from bundle import folders


def write(name: str, packages: Sequence[Package], path: Path, optional: Sequence[Package] = ()) -> None:
    """CycloneDX 1.6 for the environment `name` of these packages, as `path`.

    What is `optional` and not among them is said to be so: the user's own pip step brings it, or does not.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    ordered = sorted(packages, key=lambda package: (package.name, package.manager))
    there = {(package.manager, package.name.lower()) for package in packages}
    left = [package for package in optional if (package.manager, package.name.lower()) not in there]
    folders.write(path, json.dumps(document(name, ordered, optional=left), indent=1) + "\n")


def of_records(records: Sequence[RepoDataRecord]) -> list[Package]:
    """Packages of conda, as the solver gives them."""
    return list(map(_package, records))


def of_pip(requirements: Sequence[str]) -> list[Package]:
    """What a pip step names, each with the version that it is pinned to."""
    found = []
    for requirement in map(Requirement, requirements):
        pinned = [one.version for one in requirement.specifier if one.operator == "=="]
        found.append(Package(requirement.name, pinned[0] if pinned else "", "", "pip", "", "", (), "", ""))
    return found


def _package(record: RepoDataRecord) -> Package:
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
