"""What the tests of channels share; the fixture `small` is in conftest.py."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from rattler import Subdir

from bundle.base import Base
from bundle.folders import Folders

ROOT = Path(__file__).parents[3]
PLATFORM = str(Subdir.current())
# Where the tests of the bundle and those of the images share a stand-in channel with what needs no framework: it is
# made once in a run, and kept.
SHARED = Folders(ROOT, ROOT / "out/test-channel")


@dataclass(frozen=True)
class Small:
    """A tree with recipes, the channel that was built from it, and what it was built on."""

    where: Folders
    base: Base

    @property
    def channels(self) -> list[str]:
        """Ours first."""
        return [self.where.channel.as_uri(), self.base.address]


def tree(prefix: Path) -> dict[str, tuple[int, bytes | str | None]]:
    """Every path below `prefix` with its kind, and its content if it is a file."""
    found: dict[str, tuple[int, bytes | str | None]] = {}
    for root, folders, names in os.walk(prefix):
        for name in (*folders, *names):
            path = Path(root, name)
            content: bytes | str | None = None
            if path.is_symlink():
                content = os.readlink(path)
            elif path.is_file():
                content = path.read_bytes()
            found[str(path.relative_to(prefix))] = (path.lstat().st_mode & 0o170111, content)
    return found


def differences(
    before: dict[str, tuple[int, bytes | str | None]], after: dict[str, tuple[int, bytes | str | None]]
) -> list[str]:
    """The paths that are in one of two trees only, or differ; what conda-meta notes of a package is not compared."""
    changed = {path for path in before.keys() & after.keys() if before[path] != after[path]}
    return sorted(before.keys() ^ after.keys() | {path for path in changed if not path.startswith("conda-meta")})
