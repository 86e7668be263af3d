"""Packages of a few lines each, installed and laid out as the real ones are."""

import io
import json
import os
import shutil
import sys
import tarfile
from hashlib import sha256
from pathlib import Path

import pytest

from bundle import install
from images import environment
from images.environment import Environment

rattler = pytest.importorskip("rattler")

LIBRARY = f"lib/python{sys.version_info.major}.{sys.version_info.minor}"
MODULE = f"{LIBRARY}/site-packages"
PLACEHOLDER = "/placeholder" * 20  # as long as conda's, which is cut to what is put in its place


def package(folder: Path, name: str, files: dict[str, str], version: str = "1") -> "rattler.RepoDataRecord":
    """A conda package with these files, where a value beginning with -> is a link; its record, as a channel has it."""
    index = {"name": name, "version": version, "build": "0", "build_number": 0, "subdir": "linux-64", "depends": []}
    paths = []
    for path, text in files.items():
        entry = {"_path": path, "path_type": "softlink" if text.startswith("->") else "hardlink"}
        if PLACEHOLDER in text:
            entry |= {"prefix_placeholder": PLACEHOLDER, "file_mode": "text"}
        if not text.startswith("->"):
            entry |= {"sha256": sha256(text.encode()).hexdigest(), "size_in_bytes": len(text.encode())}
        paths.append(entry)
    made = {
        **files,
        "info/index.json": json.dumps(index),
        "info/paths.json": json.dumps({"paths": paths, "paths_version": 1}),
        "info/files": "\n".join(files),
    }
    file = folder / "linux-64" / f"{name}-{version}-0.tar.bz2"
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w:bz2") as archive:
        for path, text in made.items():
            info = tarfile.TarInfo(path)
            if text.startswith("->"):
                info.type, info.linkname = tarfile.SYMTYPE, text.removeprefix("->")
                archive.addfile(info)
            else:
                info.size, info.mode = len(text.encode()), 0o700 if path.startswith("bin/") else 0o600
                archive.addfile(info, io.BytesIO(text.encode()))
    record = rattler.PackageRecord(
        name,
        version,
        rattler.BuildString("0"),
        0,
        "linux-64",
        sha256=sha256(file.read_bytes()).digest(),
        size=file.stat().st_size,
    )
    channel = folder.as_uri()
    return rattler.RepoDataRecord(record, file.name, f"{channel}/linux-64/{file.name}", channel)


def foreign(folder: Path, version: str = "1") -> list["rattler.RepoDataRecord"]:
    python = {"bin/python": f"->{sys.executable}", f"{LIBRARY}/os_like.py": "x = 1\n"}
    library = {
        f"{MODULE}/library/__init__.py": f"version = {version}\n",
        "etc/library.conf": f"home = {PLACEHOLDER}/share\n",
        "bin/library": f"#!{PLACEHOLDER}/bin/python\n",
    }
    return [package(folder, "python", python, "3.11.7"), package(folder, "library", library, version)]


def own(folder: Path, text: str = "y = 1\n") -> "rattler.RepoDataRecord":
    files = {f"{MODULE}/lms/__init__.py": text, f"{MODULE}/library/plugin.py": "z = 1\n", "bin/lms": "#!/bin/sh\n"}
    return package(folder, "lms", files, version=str(len(text)))


def solved(*records: "rattler.RepoDataRecord", pip: tuple[str, ...] = ()) -> Environment:
    return Environment("toy", records, frozenset({"lms"}), pip)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir() and path.suffix != ".pyc"}


@pytest.fixture
def channel(tmp_path: Path) -> Path:
    return tmp_path / "channel"


def lay_out(tmp_path: Path, *records: "rattler.RepoDataRecord", pip: tuple[str, ...] = ()) -> Path:
    return environment.lay_out(solved(*records, pip=pip), tmp_path / "toy", tmp_path / "cache")


def test_every_file_is_in_one_of_the_two_layers_by_whose_package_it_is_of(tmp_path: Path, channel: Path) -> None:
    context = lay_out(tmp_path, *foreign(channel), own(channel))
    assert files(context / "ours") == {
        f"{MODULE}/lms/__init__.py",
        f"{MODULE}/library/plugin.py",
        "bin/lms",
        "conda-meta/lms-6-0.json",
    }
    framework = files(context / "framework")
    assert {f"{MODULE}/library/__init__.py", "etc/library.conf", "conda-meta/library-1-0.json"} <= framework
    assert not framework & files(context / "ours")
    assert (context / "files/usr/local/bin/bascule-host").stat().st_mode & 0o111 == 0o111
    assert not (tmp_path / "toy/whole").exists()


def test_the_environment_is_for_the_images_prefix_and_knows_no_folder_of_this_machine(
    tmp_path: Path, channel: Path
) -> None:
    context = lay_out(tmp_path, *foreign(channel), own(channel))
    assert (context / "framework/etc/library.conf").read_text() == "home = /opt/conda/share\n"
    assert (context / "framework/bin/library").read_text() == "#!/opt/conda/bin/python\n"
    for path in context.rglob("*"):
        if path.is_file() and not path.is_symlink():
            assert str(tmp_path).encode() not in path.read_bytes(), path
    assert not list(context.rglob("CACHEDIR.TAG"))
    assert PLACEHOLDER not in "".join(path.read_text() for path in context.glob("*/conda-meta/*.json"))
    # What was rewritten is still what conda and `bascule` read.
    for path in context.glob("*/conda-meta/*.json"):
        assert rattler.PrefixRecord.from_path(path).name.normalized in ("python", "library", "lms")


def test_compiled_files_do_not_depend_on_dates_which_the_layers_set_anew(tmp_path: Path, channel: Path) -> None:
    context = lay_out(tmp_path, *foreign(channel), own(channel))
    for module in ("framework", "library/__init__"), ("ours", "lms/__init__"), ("ours", "library/plugin"):
        source = context / module[0] / MODULE / f"{module[1]}.py"
        compiled = source.parent / "__pycache__" / f"{source.stem}.{sys.implementation.cache_tag}.pyc"
        data = compiled.read_bytes()
        assert int.from_bytes(data[4:8], "little") == 0b01  # by the source's hash, which nobody checks
        assert f"/opt/conda/{MODULE}/{module[1]}.py".encode() in data  # what tracebacks name


@pytest.mark.parametrize("mask", [0o002, 0o022, 0o077])
def test_root_owns_everything_and_everyone_may_read_it_whoever_lays_it_out(
    tmp_path: Path, channel: Path, monkeypatch: pytest.MonkeyPatch, mask: int
) -> None:
    sources = tmp_path / "files"  # as git checks them out with this mask
    shutil.copytree(environment.FILES, sources)
    for path in (sources, *sources.rglob("*")):
        path.chmod((0o777 if path.stat().st_mode & 0o100 else 0o666) & ~mask)
    monkeypatch.setattr(environment, "FILES", sources)
    before = os.umask(mask)
    try:
        context = lay_out(tmp_path, *foreign(channel), own(channel))
    finally:
        os.umask(before)
    for part in ("framework", "ours", "files"):
        for path in (context / part, *(context / part).rglob("*")):
            if not path.is_symlink():
                run = path.is_dir() or path.parent.name == "bin"
                assert path.stat().st_mode & 0o777 == (0o755 if run else 0o644), path


def test_a_change_of_ours_leaves_the_frameworks_layer_untouched(tmp_path: Path, channel: Path) -> None:
    first = foreign(channel)
    context = lay_out(tmp_path, *first, own(channel))
    before = {path: os.lstat(path) for path in (context / "framework").rglob("*")}
    lay_out(tmp_path, *first, own(channel, "y = 1234\n"))
    assert {path: os.lstat(path).st_mtime_ns for path in (context / "framework").rglob("*")} == {
        path: status.st_mtime_ns for path, status in before.items()
    }
    assert (context / f"ours/{MODULE}/lms/__init__.py").read_text() == "y = 1234\n"


def test_what_the_pip_step_brought_along_makes_the_frameworks_layer_anew(
    tmp_path: Path, channel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = {"tool": "1", "what_it_needs": "1"}  # the second is nowhere pinned

    def pip(prefix: Path, *words: str) -> None:
        assert words == ("install", "--no-compile", "tool ==1")
        for name, version in versions.items():
            (prefix / MODULE / f"{name}-{version}.dist-info").mkdir()

    monkeypatch.setattr(install, "pip", pip)
    records = [*foreign(channel), own(channel)]
    context = lay_out(tmp_path, *records, pip=("tool ==1",))
    assert (context / "framework.lock").read_text().splitlines()[-2:] == ["pip tool-1", "pip what_it_needs-1"]
    versions["what_it_needs"] = "2"
    lay_out(tmp_path, *records, pip=("tool ==1",))
    assert (context / f"framework/{MODULE}/what_it_needs-2.dist-info").is_dir()


def test_scripts_of_the_pip_step_run_the_images_python(tmp_path: Path) -> None:
    whole = tmp_path / "whole of it"
    (whole / "bin").mkdir(parents=True)
    (whole / "bin/tool").write_text(f"#!{whole}/bin/python3\nprint(1)\n")
    # As pip writes it where the first line would have a blank or be too long for the kernel.
    second = "'''exec' \"{}/bin/python3\" \"$0\" \"$@\"\n' '''\nprint(1)\n"
    (whole / "bin/long").write_text("#!/bin/sh\n" + second.format(whole))
    (whole / "bin/other").write_text(f"#!/bin/sh\n# no python\n# {whole}/bin/\n")
    environment._forget_this_machine(whole, whole)
    assert (whole / "bin/tool").read_text() == "#!/opt/conda/bin/python3\nprint(1)\n"
    assert (whole / "bin/long").read_text() == "#!/bin/sh\n" + second.format("/opt/conda")
    assert (whole / "bin/other").read_text() == f"#!/bin/sh\n# no python\n# {whole}/bin/\n"
