"""Lays out what goes into an image: the environment in two parts, and the files of envs/images.

The parts are two layers: what comes from elsewhere (framework/: gigabytes, changes with a pin), and our own packages
(ours/: a few megabytes, change with every commit).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rattler import RepoDataRecord

from bundle import install
from bundle.errors import BundleError

PREFIX = Path("/opt/conda")  # where the environment lies in the image
FILES = Path(__file__).parents[2] / "envs/images/files"
_VERSION = "4"  # of this layout: another one makes every layer anew
# Of a record: this machine's folders, and the time at which its channel was indexed.
_LOCAL = ("extracted_package_dir", "package_tarball_full_path", "link", "indexed_timestamp")


@dataclass(frozen=True)
class Environment:
    """An environment that was solved."""

    name: str
    records: tuple[RepoDataRecord, ...]  # its packages
    ours: frozenset[str]  # the names of those that are ours
    pip: tuple[str, ...] = ()  # the requirements of its own pip step
    system: tuple[str, ...] = ()  # Debian's packages that these need below them

    def lock(self, by_pip: Iterable[str]) -> str:
        """What framework/ follows from, with what the pip step installed: when it is the same, so is the layer."""
        foreign = (record for record in self.records if record.name.normalized not in self.ours)
        lines = sorted(f"{one.name.normalized} {one.version} {one.build} {one.sha256!r}" for one in foreign)
        return "\n".join([f"layout {_VERSION}", *lines, *(f"pip {name}" for name in sorted(by_pip)), ""])


def lay_out(environment: Environment, folder: Path, cache: Path) -> Path:
    """The context of the image's build, in `folder`; `cache` keeps unpacked packages.

    Raises BundleError: a package is damaged, two claim one file, pip fails, or Python files do not compile.

    framework/ is left as it is while its lock is the same, so that an engine finds its layer made already.
    """
    context, whole = folder / "context", folder / "whole"
    locked = context / "framework.lock"
    for path in (whole, context / "ours", context / "files"):
        shutil.rmtree(path, ignore_errors=True)
    context.mkdir(parents=True, exist_ok=True)
    install.install(environment.records, whole, cache, target=PREFIX)
    if both := install.clobbered(whole):
        raise BundleError(f"environment {environment.name!r}: files of two packages: {'; '.join(both[:5])}")
    by_pip = _pip(environment.pip, whole)
    _split(whole, context / "ours", environment.ours)
    _forget_this_machine(context / "ours", whole)
    framework = context / "framework"
    lock = environment.lock(by_pip)
    if not (locked.is_file() and locked.read_text() == lock):
        locked.unlink(missing_ok=True)
        shutil.rmtree(framework, ignore_errors=True)
        _forget_this_machine(whole, whole)
        _compile(whole, whole)
        _readable(whole)
        whole.rename(framework)
        locked.write_text(lock)
    _compile(context / "ours", framework)
    shutil.rmtree(whole, ignore_errors=True)
    shutil.copytree(FILES, context / "files")
    for path in (context / "ours", context / "files"):
        _readable(path)
    (context / ".dockerignore").write_text("framework.lock\n")
    return context


def _pip(requirements: Sequence[str], prefix: Path) -> set[str]:
    """The environment's own pip step; what it installed, as NAME-VERSION. Raises BundleError."""
    if not requirements:
        return set()

    def there() -> set[str]:
        return {path.name.removesuffix(".dist-info") for path in prefix.glob("lib/python3*/site-packages/*.dist-info")}

    before = there()
    install.pip(prefix, "install", "--no-compile", *requirements)
    return there() - before


def _forget_this_machine(folder: Path, whole: Path) -> None:
    """Take this machine's paths and times out of what the installers recorded in `folder`, a part of `whole`.

    The same lock then gives the same layer.
    """
    (folder / "CACHEDIR.TAG").unlink(missing_ok=True)  # rattler's; whoever makes copies would skip the folder
    for path in (folder / "conda-meta").glob("*.json"):
        record = json.loads(path.read_text())
        for key in _LOCAL:
            record.pop(key, None)
        for entry in record.get("paths_data", {}).get("paths", []):
            entry.pop("prefix_placeholder", None)  # where it was built, which is replaced in its files
            entry.pop("file_mode", None)
        if str(record.get("url", "")).startswith("file:"):
            # Only its name is left: the channel is a folder here.
            record["channel"] = "bascule"
            record["url"] = f"https://localhost/bascule/{record['subdir']}/{record['fn']}"
        _replace(path, json.dumps(record, indent=2, sort_keys=True))
    # pip's scripts: the first line names python, or where that has a blank or is long, the second, which sh reads.
    old = f"{whole}/bin/"
    for path in folder.glob("bin/*"):
        if path.is_file() and not path.is_symlink():
            head = path.read_bytes()[:1024].split(b"\n")[:2]
            if head[0].startswith(b"#!") and any(old.encode() in line for line in head):
                _replace(path, path.read_text().replace(old, f"{PREFIX}/bin/", 1))
    for path in folder.glob("lib/python*/site-packages/*.dist-info/direct_url.json"):
        if json.loads(path.read_text()).get("url", "").startswith("file:"):  # where it was built
            path.unlink()


def _split(whole: Path, ours: Path, names: Iterable[str]) -> None:
    """Move the files of the packages `names` from `whole` to `ours`."""
    ours.mkdir()
    for path in sorted((whole / "conda-meta").glob("*.json")):
        record: dict[str, Any] = json.loads(path.read_text())
        if record["name"] not in names:
            continue
        for file in [*record["files"], str(path.relative_to(whole))]:
            if not os.path.lexists(whole / file):
                continue  # a compiled file, which is compiled again
            (ours / file).parent.mkdir(parents=True, exist_ok=True)
            (whole / file).rename(ours / file)
            with contextlib.suppress(OSError):  # others are in there
                os.removedirs((whole / file).parent)


def _compile(folder: Path, environment: Path) -> None:
    """Compile the Python sources in `folder`, but for their tests, with the python of `environment`.

    A compiled file usually names its source's date, which the image's layers set anew: every start in a container would
    compile again and keep nothing. These are taken as they are.
    """
    (library,) = (environment / "lib").glob("python3.*")
    target = folder / "lib" / library.name
    if not any(target.rglob("*.py")):
        return
    command: list[str | Path] = [environment / "bin/python", "-I", "-m", "compileall", "-qq", "-f", "-j", "2"]
    command += ["-x", "/tests/", "--invalidation-mode", "unchecked-hash", "-s", folder, "-p", PREFIX, target]
    # Its status is 1 where a file cannot be compiled, and tests of compilers bring such files on purpose.
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode not in (0, 1) or not any(target.rglob("*.pyc")):
        raise BundleError(f"{folder}: its Python files could not be compiled: {done.stderr.strip()[-1000:]}")


def _readable(folder: Path) -> None:
    """Let everyone read what root will own in the image, and nobody else write it."""
    for root, _, names in os.walk(folder):
        for path in (Path(root), *(Path(root, name) for name in names)):
            if not path.is_symlink():
                mode = path.stat().st_mode
                wanted = (mode | 0o444 | (0o111 if path.is_dir() or mode & 0o100 else 0)) & ~0o022
                if wanted != mode:
                    path.chmod(wanted & 0o7777)


def _replace(path: Path, text: str) -> None:
    """Write a new file in `path`'s place: the old one may be the cache's too."""
    aside = path.with_name(f"{path.name}.new")
    aside.write_text(text)
    aside.chmod(path.stat().st_mode & 0o7777)
    aside.replace(path)
