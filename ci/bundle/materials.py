"""The bill of materials of an environment that was solved, as `bascule sbom` makes it of an installed one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rattler import RepoDataRecord

from bascule.inventory import Package
from bascule.sbom import document


def write(name: str, records: Sequence[RepoDataRecord], path: Path) -> None:
    """CycloneDX 1.6 for the environment `name` of these packages, as `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.new")
    packages = sorted(map(_package, records), key=lambda package: package.name)
    aside.write_text(json.dumps(document(name, packages), indent=1) + "\n")
    aside.replace(path)


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
