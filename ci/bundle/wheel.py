"""One wheel as a conda package: where its files lie in a prefix, and what it depends on by conda-forge's names.

Source: the binary distribution format and the core metadata of PyPA's specifications.
"""

from __future__ import annotations

import compileall
import email
import importlib.metadata
import py_compile
import re
import shutil
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import cast

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from bascule import inventory
from bundle.errors import BundleError

# conda-forge's names where they are not the package index's.
RENAMED = {
    "flatbuffers": "python-flatbuffers",
    "importlib-resources": "importlib_resources",
    "libclang": "python-clang",
    "lmdb": "python-lmdb",
    "matplotlib": "matplotlib-base",
    "ml-dtypes": "ml_dtypes",
    "opt-einsum": "opt_einsum",
    "prometheus-client": "prometheus_client",
    "psycopg-binary": "psycopg-c",  # the same code, with a libpq of its own
    "torch": "pytorch",
    "typing-extensions": "typing_extensions",
}
# What conda-forge's packages need beyond what wheels say: of the two MPIs an environment holds one.
_MORE = {"mpich": ("mpi 1.0.* mpich",), "openmpi": ("mpi 1.0.* openmpi",)}
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
SITE_PACKAGES = PurePosixPath("lib", f"python{PYTHON}", "site-packages")

# Starts the Python that lies beside it, wherever both are: nothing has to be rewritten in an installed prefix.
_LAUNCHER = """#!/bin/sh
'''exec' "$(dirname "$(readlink -f "$0")")/python{python}" "$0" "$@"
' '''
import sys
from {module} import {attribute}
sys.exit({call}())
"""
_HEAD = b"#!python"


@dataclass(frozen=True)
class Described:
    """What a package of the stand-in says of itself, in conda's words."""

    name: str
    version: str
    build: str
    depends: tuple[str, ...]
    license: str
    summary: str


def conda_name(name: str) -> str:
    """conda-forge's name of a distribution."""
    canonical = canonicalize_name(name)
    return RENAMED.get(canonical, str(canonical))


def describe(path: Path) -> Described:
    """What the wheel at `path` says of itself.

    Raises BundleError if it is damaged, or if conda's words cannot say it.
    """
    _, version, _, _ = parse_wheel_filename(path.name)
    try:
        metadata, for_python = _metadata(path), _holds_python(path)
    except zipfile.BadZipFile as error:
        raise BundleError(f"{path} is damaged ({error}): remove it and run this again, which fetches it") from None
    depends = [f"python {PYTHON}.*"] if for_python else []
    environment: dict[str, str] = {**{k: str(v) for k, v in default_environment().items()}, "extra": ""}
    for line in metadata.get_all("Requires-Dist") or []:
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate(environment):
            depends.append(dependency(requirement, path.name))
    return Described(
        name=conda_name(str(metadata["Name"])),
        version=version.public,  # conda-forge's have no +cpu
        build=f"py{PYTHON.replace('.', '')}_0" if for_python else "0",
        depends=(*depends, *_MORE.get(conda_name(str(metadata["Name"])), ())),
        license=inventory.license_of(metadata),
        summary=(metadata.get_all("Summary") or [""])[0],
    )


def dependency(requirement: Requirement, whose: str) -> str:
    """A requirement as conda writes it (`typing_extensions >=4.10,<5`). Raises BundleError if it cannot be."""
    if requirement.url or any(specifier.operator == "===" for specifier in requirement.specifier):
        raise BundleError(f"{whose}: {requirement} cannot be written as a dependency of a conda package")
    parts = []
    for specifier in sorted(requirement.specifier, key=str):
        if specifier.operator == "==" and specifier.version.endswith(".*"):
            parts.append(specifier.version)
        else:
            parts.append(f"{specifier.operator}{specifier.version}")
    return " ".join([conda_name(requirement.name), ",".join(parts)]).strip()


def stage(path: Path, folder: Path) -> None:
    """Lay the wheel's files into `folder` as they lie in a prefix, with launchers for its commands."""
    site = folder / SITE_PACKAGES
    places = {
        "purelib": site,
        "platlib": site,
        "scripts": folder / "bin",
        "data": folder,
        "headers": folder / "include" / f"python{PYTHON}",
    }
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if member.is_dir():
                continue
            parts = PurePosixPath(member.filename).parts
            if ".." in parts or member.filename.startswith("/"):
                raise BundleError(f"{path.name}: the member {member.filename!r} would lie outside the prefix")
            target = site.joinpath(*parts)
            if parts[0].endswith(".data"):
                target = places[parts[1]].joinpath(*parts[2:])
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as source, target.open("wb") as file:
                shutil.copyfileobj(source, file, 1 << 20)
            mode = member.external_attr >> 16
            if mode & 0o111 or target.parent == folder / "bin":
                target.chmod(0o755)
            if target.parent == folder / "bin":
                _head(target)
    for information in site.glob("*.dist-info"):
        (information / "INSTALLER").write_text("conda\n")
    _launchers(site, folder / "bin")
    compiled(folder)


def compiled(folder: Path) -> None:
    """Compile the modules below `folder`, as conda's builders do: else each new prefix would compile them once more.

    Whatever a file's date comes to be, its compiled form holds: an installer does not change one alone. Tests that come
    with packages are left out; some bring what no compiler takes.
    """
    compileall.compile_dir(
        folder / SITE_PACKAGES.parent, quiet=2, maxlevels=100, rx=re.compile("/tests?/"), stripdir=str(folder),
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )  # fmt: skip


def _head(script: Path) -> None:
    """A script of the wheel's own that begins with `#!python` gets the Python beside it."""
    content = script.read_bytes()
    if content.startswith(_HEAD):
        rest = content.partition(b"\n")[2]
        launcher = _LAUNCHER.split("import sys")[0].format(python=PYTHON).encode()
        script.write_bytes(launcher + rest)


def _launchers(site: Path, folder: Path) -> None:
    for distribution in importlib.metadata.distributions(path=[str(site)]):
        for one in distribution.entry_points.select(group="console_scripts"):
            folder.mkdir(exist_ok=True)
            script, first = folder / one.name, one.attr.partition(".")[0]
            script.write_text(_LAUNCHER.format(python=PYTHON, module=one.module, attribute=first, call=one.attr))
            script.chmod(0o755)


def _holds_python(path: Path) -> bool:
    """Whether it has modules or commands: an MPI's wheel is programs and libraries only."""
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            top = name.partition("/")[0]
            if not top.endswith((".data", ".dist-info")) or name.endswith("/entry_points.txt"):
                return True
    return False


def _metadata(path: Path) -> importlib.metadata.PackageMetadata:
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if name.count("/") == 1 and name.endswith(".dist-info/METADATA")]
        if len(names) != 1:
            raise BundleError(f"{path}: expected one METADATA, found {len(names)}; remove the file and run this again")
        # Not by a zipfile.Path, which lists all files first.
        said = email.message_from_string(archive.read(names[0]).decode())
    return cast("importlib.metadata.PackageMetadata", said)
