"""One folder (and one tar) from which environments are installed where there is no network.

    channel/linux-64, channel/noarch   every package of the environments, ours and others', with an index
    envs/                              the environment files, whose channel is the mirror's own
    sbom/                              what each environment holds (CycloneDX)
    tools/                             an installer that needs no conda: install_env and py-rattler's wheel
    SHA256SUMS, verify_mirror          checksums of all files, and the program that checks them

A run that was interrupted goes on: what is there and has the right checksum stays, a file that was fetched in part is
fetched on from there. The index is made of the solver's own records, so that what conda-forge mends in its index after
a package was made (patches of dependencies) holds in the mirror too.
"""

from __future__ import annotations

import http.client
import json
import os
import shutil
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import yaml

from bundle import environment_file, materials, solving, wheels
from bundle.base import Base
from bundle.environment_file import Environment
from bundle.errors import BundleError, ToolError
from bundle.folders import Folders, checksum_of, is_ours, path_of, write
from bundle.progress import steps

SUMS = "SHA256SUMS"
_FETCHED = ".fetched"  # in it, what is no part of it yet; verify_mirror looks at no name with a dot
_MARK = ".mirror"  # in a folder that a mirror may be written to, before anything else is there
_VARIANTS = ("ddl * mpi_openmpi_*", "ddl * mpi_mpich_*")
_CHUNK = 1 << 20
_SECONDS = 60  # without a byte, a download is given up


@dataclass(frozen=True)
class File:
    """A package that the mirror is to hold."""

    url: str
    place: str  # below the mirror's folder
    sha256: str
    nbytes: int
    record: Mapping[str, object]  # of the index


def claim(target: Path, where: Folders, *, tar: bool) -> None:
    """Mark `target` as a mirror's. Raises ToolError where it, or its `tar`, is or lies in what is none."""
    # One that came out of a tar has the checker and no mark.
    if not is_ours(target, _MARK, "verify_mirror"):
        raise ToolError(f"{target} holds what is no mirror's, and may be overwritten: name an empty or a new folder")
    place = target.resolve()
    for folder in (where.channel, where.work, where.stand_in):
        other = folder.resolve()
        if place.is_relative_to(other) or other.is_relative_to(place):
            raise ToolError(f"{target} is no place for a mirror, which would overwrite {folder}: name another folder")
    if tar and not _is_mirror(_tar_of(target), target.name):
        raise ToolError(
            f"{_tar_of(target)} is there and is no mirror's, and would be replaced: name another folder, move the file "
            "away, or ask for no tar (--no-tar)"
        )
    target.mkdir(parents=True, exist_ok=True)
    (target / _MARK).touch()


def _tar_of(target: Path) -> Path:
    return target.with_name(f"{target.name}.tar")


def _is_mirror(tar: Path, name: str) -> bool:
    """Whether it may be replaced: it is missing, or the tar of a mirror that is called `name`."""
    if not os.path.lexists(tar):
        return True
    try:
        with tarfile.open(tar, "r:") as archive:
            return f"{name}/verify_mirror" in archive.getnames()
    except (OSError, tarfile.TarError):
        return False


def make(
    where: Folders,
    base: Base,
    names: Sequence[str],
    target: Path,
    *,
    tar: bool,
    variants: Sequence[str] = _VARIANTS,
) -> Path:
    """Bring the mirror for the environments `names` up to date; its folder, or its tar. Raises BundleError.

    Every environment is to be had from it with each of `variants` in turn; one that does not exist is the solver's
    error.
    """
    target.mkdir(parents=True, exist_ok=True)
    asked = [environment_file.read(where.tree / "envs" / f"{name}.yaml") for name in names]
    files: dict[str, File] = {}
    bills: list[Callable[[], None]] = []
    for one in asked:
        name = one.path.stem
        for variant in variants:
            records = solving.solve(one, [*one.of_conda(with_pip=False), variant], where, base)
            chosen = variant.partition("mpi_")[2].rstrip("_*") or variant
            bill = target / "sbom" / f"{name}-{chosen}.cdx.json"
            of_pip = materials.of_pip(one.pip)
            bills.append(partial(materials.write, name, materials.of_records(records), bill, of_pip))
            for record in records:
                if record.sha256 is None:
                    raise BundleError(f"{record.url} has no SHA-256 in its channel's index: it cannot be mirrored")
                place = f"channel/{record.subdir}/{record.file_name}"
                text = json.loads(record.to_json())
                files[place] = File(str(record.url), place, record.sha256.hex(), record.size or 0, text)
    fetch(list(files.values()), target)
    installer = _installer(where)
    # Only what is complete takes the place of what an earlier run left.
    settle(list(files.values()), target)
    shutil.rmtree(target / "sbom", ignore_errors=True)
    for write_bill in bills:
        write_bill()
    _texts(where, asked, installer, target)
    write_sums(target)
    if not tar:
        return target
    return _tar(target)


def fetch(files: Sequence[File], target: Path) -> None:
    """Every file that is not at its place yet, with its checksum, in a folder aside. Raises ToolError."""
    with steps("mirror", sum(file.nbytes for file in files), "B", lines=False) as step:
        for file in files:
            path = target / _FETCHED / file.place
            if any(one.exists() and checksum_of(one) == file.sha256 for one in (target / file.place, path)):
                step(path.name, file.nbytes)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            _fetch_one(file, path, partial(step, path.name))


def settle(files: Sequence[File], target: Path) -> None:
    """Put what was fetched at its place, with the index of all `files`, and remove every other package."""
    for file in files:
        if (fetched := target / _FETCHED / file.place).exists():
            (target / file.place).parent.mkdir(parents=True, exist_ok=True)
            fetched.replace(target / file.place)
    write_index(files, target / "channel")
    wanted = {file.place for file in files}
    for path in (target / "channel").glob("*/*"):
        if str(path.relative_to(target)) not in wanted and path.name != "repodata.json":
            path.unlink()
    shutil.rmtree(target / _FETCHED, ignore_errors=True)


def _fetch_one(file: File, path: Path, step: Callable[[int], None]) -> None:
    """Into a file beside, which goes on where an earlier run was interrupted, and is renamed when it is right."""
    aside = path.with_name(f"{path.name}.part")
    try:
        _append(file.url, aside, step)
    except (OSError, http.client.HTTPException) as error:
        raise ToolError(f"{file.url} could not be fetched: {error}; run this again, and it goes on") from None
    if (there := aside.stat().st_size) < file.nbytes:  # a connection that is cut looks like an end
        raise ToolError(f"{file.url} ended after {there} of {file.nbytes} bytes; run this again, and it goes on")
    found = checksum_of(aside)
    if found != file.sha256:
        aside.unlink()
        raise ToolError(
            f"{file.url} has checksum {found}, but its channel's index says {file.sha256}: the file is damaged, or was "
            "replaced after the index was made. Nothing of it was kept; run this again, or index the channel anew"
        )
    aside.replace(path)


def _append(url: str, aside: Path, step: Callable[[int], None]) -> None:
    there = aside.stat().st_size if aside.exists() else 0
    if local := path_of(url):
        source = local.open("rb")
        source.seek(there)
    else:
        request = urllib.request.Request(url, headers={"Range": f"bytes={there}-"} if there else {})
        try:
            source = urllib.request.urlopen(request, timeout=_SECONDS)
        except urllib.error.HTTPError as error:
            if error.code != 416:  # 416: it is all there already
                raise
            return
        if there and source.status != 206:  # the server began from the start
            there = 0
    with source, aside.open("r+b" if there else "wb") as file:
        file.seek(there)
        step(there)
        while chunk := source.read(_CHUNK):
            file.write(chunk)
            step(len(chunk))


def write_index(files: Sequence[File], channel: Path) -> None:
    """The index of the mirror's channel, of the records of the channels that its packages are from."""
    by_subdir: dict[str, dict[str, Mapping[str, object]]] = {"noarch": {}}
    for file in files:
        _, subdir, name = file.place.split("/")
        by_subdir.setdefault(subdir, {})[name] = file.record
    for subdir, records in by_subdir.items():
        folder = channel / subdir
        folder.mkdir(parents=True, exist_ok=True)
        document = {
            "info": {"subdir": subdir},
            "packages": {name: one for name, one in sorted(records.items()) if name.endswith(".tar.bz2")},
            "packages.conda": {name: one for name, one in sorted(records.items()) if name.endswith(".conda")},
            "repodata_version": 1,
        }
        write(folder / "repodata.json", json.dumps(document, indent=1, sort_keys=True) + "\n")


def _installer(where: Folders) -> Path:
    """The wheel of py-rattler. Raises ToolError."""
    found = wheels.download(["py-rattler"], where.tree / "ci/constraints.txt", where.work / "wheels")
    return next(wheel for wheel in found if wheel.name.startswith("py_rattler-"))


def _texts(where: Folders, environments: Sequence[Environment], installer: Path, target: Path) -> None:
    """Environment files that name the mirror's channel, the installer, the checker, a page."""
    for folder in ("envs", "tools"):
        shutil.rmtree(target / folder, ignore_errors=True)
        (target / folder).mkdir()
    for one in environments:
        write(target / "envs" / one.path.name, described(one))
    here = where.tree / "ci"
    for script, place in (("install_env", "tools/install_env"), ("verify_mirror", "verify_mirror")):
        shutil.copy2(here / script, target / place)
    shutil.copy2(installer, target / "tools" / installer.name)
    names = [one.path.stem for one in environments]
    write(target / "README.txt", _PAGE.format(names=", ".join(names), first=names[0]))


def described(asked: Environment) -> str:
    """An environment file that names the mirror's channel only, and no pip step, which would need a network."""
    # Which channel a package is from is settled: there is one here.
    specs = [spec.rpartition("::")[2] for spec in asked.of_conda(with_pip=False)]
    lines = [f"name: {_scalar(asked.name)}", "channels:", "  - ./channel", "  - nodefaults", "dependencies:"]
    lines += [f"  - {_scalar(spec)}" for spec in specs]
    if asked.pip:
        lines.insert(0, f"# Left out, because it is on no channel: {', '.join(asked.pip)}, by your own pip step.")
    return "\n".join(lines) + "\n"


def _scalar(text: str) -> str:
    """In YAML: as it is where that says the same, else in quotes."""
    try:
        plain = yaml.safe_load(f"- {text}") == [text]
    except yaml.YAMLError:
        plain = False
    return text if plain else json.dumps(text)


def write_sums(target: Path) -> None:
    """Checksums of every file below `target`, in the form of sha256sum."""
    paths = [path for path in _content(target) if path.name != SUMS]
    lines = [f"{checksum_of(path)}  {path.relative_to(target)}" for path in paths]
    write(target / SUMS, "\n".join(lines) + "\n")


def _content(target: Path) -> list[Path]:
    """The mirror's files, sorted; no lock, mark, or what was fetched for the next one."""
    files = (path for path in target.rglob("*") if path.is_file())
    return sorted(path for path in files if not any(part[0] == "." for part in path.relative_to(target).parts))


def _tar(target: Path) -> Path:
    """Not compressed: the packages are."""
    made = _tar_of(target)
    aside = made.with_name(f".{made.name}.new")
    paths = _content(target)
    total = sum(path.stat().st_size for path in paths)
    try:
        with steps(f"{made.name}", total, "B", lines=False) as step, tarfile.open(aside, "w") as archive:
            for path in paths:
                archive.add(path, f"{target.name}/{path.relative_to(target)}")
                step(path.name, path.stat().st_size)
        aside.replace(made)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    return made


_PAGE = """A mirror of Bascule's channel, with all that it depends on: {names}.

Check it:                        ./verify_mirror
Install without conda:           tools/install_env {first} /some/prefix
With conda, from this folder:    conda env create --offline -f envs/{first}.yaml
With MPICH:                      tools/install_env {first} /some/prefix --mpi mpich

No program here needs a network. snapml is not here: IBM's licence forbids passing it on.
"""
