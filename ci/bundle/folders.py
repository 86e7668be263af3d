"""Where everything lies, and which files are sources."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

# What builds leave beside sources: what .gitignore names, by which a source cannot be called either.
_DEBRIS_FOLDERS = {".venv", "out", "__pycache__", ".hypothesis", ".pytest_cache", ".mypy_cache", ".ruff_cache", "dist"}
_DEBRIS_FOLDERS |= {"build"}
_DEBRIS_BEGINNINGS = (".build-",)
_DEBRIS_ENDS = (".so", ".egg-info")
_GITS_OWN = ".git"


@dataclass(frozen=True)
class Folders:
    """The tree that is built, where what is made of it goes, and the one MPI that it is built for, if not for all."""

    tree: Path
    out: Path
    mpi: str | None = None

    @property
    def channel(self) -> Path:
        """The finished channel."""
        return self.out / "channel"

    @property
    def staged(self) -> Path:
        """The channel as it is being made, which users do not see."""
        return self.work / "channel"

    @property
    def work(self) -> Path:
        """What lies there between two runs, and may be removed."""
        return self.out / "bundle"

    @property
    def stand_in(self) -> Path:
        """The stand-in for conda-forge, with the wheels that it is made of."""
        return self.out / "stand-in"

    def recipes(self) -> list[Path]:
        """All recipes, that of the metapackages last."""
        return [*sorted(self.tree.glob("recipes/*/meta.yaml")), self.tree / "meta.yaml"]

    def is_bundle(self, recipe: Path) -> bool:
        """Whether `recipe` is that of the metapackages, whose folder is the whole tree."""
        return recipe.parent == self.tree

    @property
    def variants(self) -> Path:
        """The variants."""
        return self.tree / "conda_build_config.yaml"


def is_ours(folder: Path, *marks: str) -> bool:
    """Whether what lies in `folder` may be replaced: it is missing, empty, or holds one of `marks`, which we left."""
    if not folder.is_dir():
        return not folder.exists()
    return not any(folder.iterdir()) or any((folder / mark).exists() for mark in marks)


def write(path: Path, text: str) -> None:
    """`text` as the file `path`: written aside and renamed, so that a full disk leaves the old one."""
    aside = path.with_name(f".{path.name}.new")
    try:
        aside.write_text(text)
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def sources(folder: Path) -> Iterator[Path]:
    """The files below `folder` that are sources, sorted."""
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not _is_debris(name) and name not in _DEBRIS_FOLDERS)
        yield from (Path(root, name) for name in sorted(names) if not _is_debris(name))


def _is_debris(name: str) -> bool:
    return name == _GITS_OWN or name.startswith(_DEBRIS_BEGINNINGS) or name.endswith(_DEBRIS_ENDS)


def checksum(folder: Path) -> str:
    """Of the sources below `folder`: their names, contents and modes."""
    total = hashlib.sha256()
    for path in sources(folder):
        content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes()
        executable = b"x" if os.access(path, os.X_OK) else b"-"
        name = str(path.relative_to(folder)).encode()
        total.update(b"%d:%b%b%d:%b" % (len(name), name, executable, len(content), content))
    return total.hexdigest()


def checksum_of(path: Path) -> str:
    """Of a file's content, whatever its size: SHA-256, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def path_of(address: str) -> Path | None:
    """The file or folder that an address names; None for one of another machine."""
    parts = urlsplit(address)
    return Path(unquote(parts.path)) if parts.scheme == "file" else None


def copy(folder: Path, target: Path) -> None:
    """The sources below `folder` and no debris, as `target`, which is replaced."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for path in sources(folder):
        to = target / path.relative_to(folder)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, to, follow_symlinks=False)
