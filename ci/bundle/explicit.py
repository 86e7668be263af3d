"""A lock file: an environment as conda's explicit list, each package by its address and its checksum.

Only what was solved from real channels is worth a lock file: the stand-in's packages are on this machine alone.
Source: conda's documentation, "Building identical conda environments".
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rattler import RepoDataRecord

from bundle import folders
from bundle.errors import ToolError


def text(name: str, platform: str, records: Sequence[RepoDataRecord]) -> str:
    """The list of the environment `name`, which `conda create --file` installs without solving.

    Raises ToolError where a channel does not say a package's checksum.
    """
    lines = [f"# {name} for {platform}: conda create --name NAME --file THIS_FILE", "@EXPLICIT"]
    by_name = {record.name.normalized: record for record in records}
    # What is sorted has lost its address.
    for record in (by_name[one.name.normalized] for one in RepoDataRecord.sort_topologically(list(records))):
        if record.md5 is None:  # the one checksum that every conda reads in such a list
            raise ToolError(f"{record.url} has no MD5 in its channel's index: no lock file can name it")
        lines.append(f"{record.url}#{record.md5.hex()}")
    return "\n".join(lines) + "\n"


def write(name: str, platform: str, records: Sequence[RepoDataRecord], path: Path) -> None:
    """The same as the file `path`. Raises ToolError."""
    folders.write(path, text(name, platform, records))
