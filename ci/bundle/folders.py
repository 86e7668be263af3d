"""Where everything lies, and which files are sources."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

# What builds leave beside sources, as .gitignore names it.
_DEBRIS = re.compile(
    r"\.git|\.venv|out|__pycache__|dist|build|\.(hypothesis|(pytest|mypy|ruff)_cache)|\.build-.*|.*\.(so|egg-info)"
)


@dataclass(frozen=True)
class Folders:
    """The tree that is built, and where what is made of it goes."""

    tree: Path
    out: Path

    @property
    def channel(self) -> Path:
        """The finished channel."""
        return self.out / "channel"

    @property
    def work(self) -> Path:
        """What lies there between two runs, and may be removed."""
        return self.out / "bundle"

    @property
    def stand_in(self) -> Path:
        """The stand-in for conda-forge, with the wheels that it is made of."""
        return self.out / "stand-in"

    def environment(self, name: str) -> Path:
        """A file of envs/, by its name without .yaml; or another, by its path."""
        return Path(name) if name.endswith(".yaml") else self.tree / "envs" / f"{name}.yaml"


def is_ours(folder: Path, *marks: str) -> bool:
    """Whether what lies in `folder` may be replaced: it is missing, empty, or holds one of `marks`, which we left."""
    if not folder.is_dir():
        return not folder.exists()
    return not any(folder.iterdir()) or any((folder / mark).exists() for mark in marks)


def write(path: Path, text: str) -> None:
    """`text` as the file `path`: written aside and renamed, so that a full disk leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.new")
    try:
        aside.write_text(text)
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def sources(path: Path) -> Iterator[Path]:
    """The file `path`, or the files below that folder that are sources, sorted."""
    if path.is_file():
        yield path
    for root, folders, names in os.walk(path):
        folders[:] = sorted(name for name in folders if not _DEBRIS.fullmatch(name))
        yield from (Path(root, name) for name in sorted(names) if not _DEBRIS.fullmatch(name))


def checksum(path: Path) -> str:
    """Of a file or of the sources below a folder: their names, contents and modes."""
    total = hashlib.sha256()
    for file in sources(path):
        content = checksum_of(file)
        total.update(f"{file.relative_to(path.parent)}\0{os.access(file, os.X_OK)}\0{content}\0".encode())
    return total.hexdigest()


def checksum_of(path: Path) -> str:
    """Of a file's content, whatever its size: SHA-256, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def seen(path: Path) -> list[object]:
    """A file's name, size and date: what writes to it changes one of them, unless it sets the date back."""
    status = path.lstat()
    return [path.name, status.st_size, status.st_mtime_ns]


def path_of(address: str) -> Path | None:
    """The file or folder that an address names; None for one of another machine."""
    parts = urlsplit(address)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None
