"""One folder (and one tar) from which environments are installed where there is no network.

    channel/linux-64, channel/noarch   every package of the environments, ours and others', with an index
    envs/                              the environment files, whose channel is the mirror's own
    sbom/                              what each environment holds (CycloneDX)
    tools/                             an installer that needs no conda: install_env and py-rattler's wheel
    SHA256SUMS, verify_mirror          checksums of all files, and the program that checks them

A run that was interrupted goes on: what is there and has the right checksum stays. The index is made of the solver's
own records, so that what conda-forge fixes in its index after a package was made (patches of dependencies) holds in the
mirror too.
"""

from __future__ import annotations

import http.client
import json
import shutil
import tarfile
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bundle import environment_file, materials, process, wheels
from bundle.base import Base
from bundle.environment_file import Environment
from bundle.errors import BundleError
from bundle.folders import Folders, checksum_of, is_ours, write

SUMS = "SHA256SUMS"
_FETCHED = ".fetched"  # in it, what is no part of it yet; verify_mirror looks at no name with a dot
_MARK = ".mirror"  # in a folder that a mirror may be written to, before anything else is there
VARIANTS = ("libddl-mpi * mpi_openmpi_*", "libddl-mpi * mpi_mpich_*")
_SECONDS = 60  # without a byte, a download is given up


@dataclass(frozen=True)
class File:
    """A package that the mirror is to hold."""

    url: str
    place: str  # below the mirror's folder
    sha256: str
    nbytes: int
    record: Mapping[str, object]  # of the index


def claim(target: Path) -> None:
    """Mark `target` as a mirror's. Raises BundleError if it, or its tar, is there and is no mirror's."""
    tar = _tar_of(target)
    # One that came out of a tar has the checker and no mark.
    marked = any((target / one).exists() for one in (_MARK, "verify_mirror"))
    if not is_ours(target, _MARK, "verify_mirror") or (tar.exists() and not marked):
        raise BundleError(
            f"{target} is no mirror, or {tar.name} lies beside it without one, and both would be overwritten: move "
            f"them away, or make {target} a link to another folder"
        )
    target.mkdir(parents=True, exist_ok=True)
    (target / _MARK).touch()


def _tar_of(target: Path) -> Path:
    return target.with_name(f"{target.name}.tar")


def make(where: Folders, base: Base, names: Sequence[str], variants: Sequence[str] = VARIANTS) -> Path:
    """Bring the mirror for the environments `names` up to date, with its tar; its folder. Raises BundleError.

    Every environment is to be had from it with each of `variants` in turn.
    """
    claim(target := where.out / "mirror")
    asked = [environment_file.read(where.environment(name)) for name in names]
    files: dict[str, File] = {}
    bills: dict[str, str] = {}  # by place
    for one in asked:
        for variant in variants:
            records = environment_file.solve(one, [*one.of_conda(with_pip=False), variant], where, base)
            chosen = variant.partition("mpi_")[2].rstrip("_*") or variant
            bill = where.work / "bill.json"
            materials.write(one.path.stem, [*map(materials.of_conda, records)], bill, one.pip)
            bills[f"sbom/{one.path.stem}-{chosen}.cdx.json"] = bill.read_text()
            for record in records:
                if record.sha256 is None:
                    raise BundleError(f"{record.url} has no SHA-256 in its channel's index: it cannot be mirrored")
                place = f"channel/{record.subdir}/{record.file_name}"
                text = json.loads(record.to_json())
                files[place] = File(str(record.url), place, record.sha256.hex(), record.size or 0, text)
    fetch([*files.values()], target)
    (installer,) = (
        one
        for one in wheels.download(["py-rattler"], where.tree / "ci/constraints.txt", where.work / "wheels")
        if one.name.startswith("py_rattler-")
    )
    # Only what is complete takes the place of what an earlier run left.
    settle([*files.values()], target)
    for folder in ("sbom", "envs", "tools"):
        shutil.rmtree(target / folder, ignore_errors=True)
    for place, text in bills.items():
        write(target / place, text)
    for one in asked:
        write(target / "envs" / one.path.name, described(one))
    (target / "tools").mkdir()
    for source, place in (
        (where.tree / "ci/install_env", "tools/install_env"),
        (where.tree / "ci/verify_mirror", "verify_mirror"),
        (installer, f"tools/{installer.name}"),
    ):
        shutil.copy2(source, target / place)
    first = asked[0].path.stem
    write(target / "README.txt", _PAGE.format(names=", ".join(one.path.stem for one in asked), first=first))
    write_sums(target)
    _tar(target)
    return target


def fetch(files: Sequence[File], target: Path) -> None:
    """Every file that is not at its place yet, with its checksum, in a folder aside. Raises BundleError."""
    with process.bar("mirror", sum(file.nbytes for file in files), "B") as bar:
        for file in files:
            path = target / _FETCHED / file.place
            if not any(one.exists() and checksum_of(one) == file.sha256 for one in (target / file.place, path)):
                path.parent.mkdir(parents=True, exist_ok=True)
                _fetch_one(file, path)
            bar.update(file.nbytes)


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


def _fetch_one(file: File, path: Path) -> None:
    """Into a file beside, which is renamed when it is right."""
    aside = path.with_name(f"{path.name}.part")
    try:
        with urllib.request.urlopen(file.url, timeout=_SECONDS) as source, aside.open("wb") as to:
            shutil.copyfileobj(source, to, 1 << 20)
    except (OSError, http.client.HTTPException) as error:
        raise BundleError(f"{file.url} could not be fetched: {error}; run this again, and it goes on") from None
    if (found := checksum_of(aside)) != file.sha256:  # a connection that is cut looks like an end
        aside.unlink()
        raise BundleError(
            f"{file.url} has checksum {found}, but its channel's index says {file.sha256}: it came in part, is "
            "damaged, or was replaced after the index was made. Nothing of it was kept; run this again"
        )
    aside.replace(path)


def write_index(files: Sequence[File], channel: Path) -> None:
    """The index of the mirror's channel, of the records of the channels that its packages are from."""
    for subdir in {"noarch", *(file.place.split("/")[1] for file in files)}:
        found = sorted((file.place.rpartition("/")[2], file.record) for file in files if f"/{subdir}/" in file.place)
        document = {
            "info": {"subdir": subdir},
            "packages": {name: one for name, one in found if name.endswith(".tar.bz2")},
            "packages.conda": {name: one for name, one in found if name.endswith(".conda")},
            "repodata_version": 1,
        }
        write(channel / subdir / "repodata.json", json.dumps(document, indent=1, sort_keys=True) + "\n")


def described(asked: Environment) -> str:
    """An environment file that names the mirror's channel only, and no pip step, which would need a network.

    It is JSON, which is YAML too: the installer that goes along reads it with Python's own library.
    """
    # Which channel a package is from is settled: there is one here.
    specs = [spec.rpartition("::")[2] for spec in asked.of_conda(with_pip=False)]
    return json.dumps({"name": asked.name, "channels": ["./channel"], "dependencies": specs}, indent=2) + "\n"


def write_sums(target: Path) -> None:
    """Checksums of every file below `target`, in the form of sha256sum."""
    paths = [path for path in _content(target) if path.name != SUMS]
    write(target / SUMS, "".join(f"{checksum_of(path)}  {path.relative_to(target)}\n" for path in paths))


def _content(target: Path) -> list[Path]:
    """The mirror's files, sorted; no lock, mark, or what was fetched for the next one."""
    files = (path for path in target.rglob("*") if path.is_file())
    return sorted(path for path in files if not any(part[0] == "." for part in path.relative_to(target).parts))


def _tar(target: Path) -> None:
    """Not compressed: the packages are."""
    made = _tar_of(target)
    aside = made.with_name(f".{made.name}.new")
    try:
        with tarfile.open(aside, "w") as archive:
            for path in _content(target):
                archive.add(path, f"{target.name}/{path.relative_to(target)}")
        aside.replace(made)
    finally:
        aside.unlink(missing_ok=True)


_PAGE = """A mirror of Bascule's channel, with all that it depends on: {names}.

Check it:                        ./verify_mirror
Install without conda:           tools/install_env {first} /some/prefix
With conda, from this folder:    conda create --offline --override-channels -c file://$PWD/channel \\
                                     --name {first} --file envs/{first}.yaml
                                 (conda 26.7; for an older one write the packages in place of --file and its name)
With MPICH:                      tools/install_env {first} /some/prefix --mpi mpich

No program here needs a network. snapml is not here: IBM's licence forbids passing it on.
"""
