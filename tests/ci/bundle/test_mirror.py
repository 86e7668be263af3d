"""A mirror of the small channel, and installs from it where there is no network."""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from small_channel import ROOT, Small

from bundle import environment_file, mirror, wheels
from bundle.errors import BundleError
from bundle.folders import Folders

pytestmark = pytest.mark.timeout(600)  # the first test makes the small channel

VARIANTS = ("small",)  # the small channel has no libddl-mpi
NO_NETWORK = ("unshare", "--net", "--")


@pytest.fixture
def file(tmp_path: Path) -> mirror.File:
    """A package of another channel."""
    source = tmp_path / "elsewhere/thing-1.0-0.conda"
    source.parent.mkdir()
    source.write_bytes(content := b"content" * 1000)
    digest = hashlib.sha256(content).hexdigest()
    return mirror.File(source.as_uri(), "channel/noarch/thing-1.0-0.conda", digest, len(content), {})


def test_what_was_fetched_is_not_fetched_again_and_takes_its_place_when_all_is_there(
    file: mirror.File, tmp_path: Path
) -> None:
    target, folder = tmp_path / "mirror", tmp_path / "mirror/channel/noarch"
    folder.mkdir(parents=True)
    for name in ("thing-0.9-0.conda", "repodata.json"):
        (folder / name).write_text("of the day before")
    mirror.fetch([file], target)
    assert not (target / file.place).exists()
    shutil.rmtree(tmp_path / "elsewhere")
    mirror.fetch([file], target)
    mirror.settle([file], target)
    mirror.fetch([file], target)
    assert sorted(path.name for path in folder.iterdir()) == ["repodata.json", "thing-1.0-0.conda"]
    assert sorted(path.name for path in target.iterdir()) == ["channel"]


def test_a_file_that_came_in_part_is_refused_and_not_kept(file: mirror.File, tmp_path: Path) -> None:
    source = tmp_path / "elsewhere/thing-1.0-0.conda"
    source.write_bytes(source.read_bytes()[:-1])
    with pytest.raises(BundleError, match="Nothing of it was kept"):
        mirror.fetch([file], tmp_path / "mirror")
    assert [path for path in (tmp_path / "mirror").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("name", ["all", "snapml"])
def test_an_environment_file_of_the_mirror_needs_no_pip_and_is_read_by_its_installer(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.yaml"
    original = environment_file.read(ROOT / f"envs/{name}.yaml")
    path.write_text(mirror.described(original))
    found = environment_file.read(path)
    assert found.channels == ("./channel",)
    assert found.specs == tuple(spec for spec in original.specs if spec != "pip")
    assert found.pip == ()
    assert json.loads(path.read_text())["dependencies"] == list(found.specs)


@pytest.fixture(scope="module")
def made(small: Small, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mirror of the small environment."""
    where = Folders(small.where.tree, tmp_path_factory.mktemp("with space") / "my out")
    wheels.download(["py-rattler"], where.tree / "ci/constraints.txt", where.work / "wheels")
    shutil.copytree(small.where.channel, where.channel)
    return mirror.make(where, small.base, ["small"], VARIANTS)


def again(small: Small, made: Path) -> None:
    mirror.make(Folders(small.where.tree, made.parent), small.base, ["small"], VARIANTS)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_mirror_and_its_tar_pass_its_own_check(made: Path, tmp_path: Path) -> None:
    subprocess.run(["tar", "--extract", "--file", f"{made}.tar", "--directory", tmp_path], check=True, timeout=60)
    for folder in (made, tmp_path / made.name):
        subprocess.run([folder / "verify_mirror"], check=True, timeout=60)


def test_it_holds_what_the_environment_needs_and_names_only_itself(made: Path) -> None:
    names = {path.name.split("-0")[0].split("-3")[0] for path in made.glob("channel/*/*.conda")}
    assert {"small", "bascule-tools", "python"} <= names
    assert "hatchling" not in " ".join(names)  # needed to build, not to run
    assert json.loads((made / "envs/small.yaml").read_text())["channels"] == ["./channel"]


def test_a_second_run_fetches_nothing(small: Small, made: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in made.glob("channel/*/*.conda")}
    again(small, made)
    assert {path: path.stat().st_mtime_ns for path in made.glob("channel/*/*.conda")} == before


@pytest.mark.parametrize("what", [(mirror, "fetch"), (wheels, "download")])
def test_a_run_that_fails_leaves_what_an_earlier_one_made(
    small: Small, made: Path, monkeypatch: pytest.MonkeyPatch, what: tuple[ModuleType, str]
) -> None:
    def fail(*_: object) -> None:
        raise BundleError("no route")

    before = contents(made)
    monkeypatch.setattr(*what, fail)
    with pytest.raises(BundleError, match="no route"):
        again(small, made)
    assert contents(made) == before


def test_a_tar_that_could_not_be_written_leaves_the_old_one(
    small: Small, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = (made.with_name("mirror.tar").stat(), sorted(made.parent.iterdir()))
    monkeypatch.setattr("tarfile.TarFile.add", full)
    with pytest.raises(OSError, match="No space left"):
        again(small, made)
    assert (made.with_name("mirror.tar").stat(), sorted(made.parent.iterdir())) == before


@pytest.mark.parametrize("name", ["mirror/mine", "mirror.tar"])
def test_a_folder_or_a_tar_that_is_no_mirrors_is_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("dear to me")
    with pytest.raises(BundleError, match="would be overwritten: move them away"):
        mirror.claim(tmp_path / "mirror")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / name]


@pytest.mark.root
def test_an_environment_is_installed_from_it_where_there_is_no_network(made: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0 or subprocess.run([*NO_NETWORK, "true"]).returncode:
        pytest.skip("only root can leave the network")
    # Without our packages: as on a machine that has nothing but a Python.
    base = getattr(sys, "_base_executable", sys.executable)
    prefix = tmp_path / "env"
    command = [*NO_NETWORK, base, "-I", made / "tools/install_env", "small", prefix, "--mpi", "none"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    ask = [*NO_NETWORK, prefix / "bin/bascule", "licenses"]
    said = subprocess.run(ask, capture_output=True, text=True, timeout=60)
    assert "bascule-tools" in said.stdout
    again = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert again.returncode == 1
    assert f"{prefix} exists already" in again.stderr


def test_an_installation_from_a_damaged_mirror_leaves_nothing(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path / "mirror")
    (package,) = (tmp_path / "mirror").glob("channel/noarch/bascule-tools-*.conda")
    package.write_bytes(package.read_bytes()[:-100])
    (tmp_path / "mirror/envs/edited.yaml").write_text("dependencies:\n  - small\n")
    prefix = tmp_path / "a/new/env"
    for name, words in (
        ("small", "nothing was left behind"),
        ("tensorflow", "there is no environment 'tensorflow'"),
        ("edited", "keep it JSON"),
    ):
        command = [sys.executable, tmp_path / "mirror/tools/install_env", name, prefix, "--mpi", "none"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=110)
        assert done.returncode == 1
        assert words in done.stderr
        assert sorted(path.name for path in tmp_path.iterdir()) == ["mirror"]


def test_the_index_is_what_the_channel_said_and_not_what_the_packages_say(tmp_path: Path) -> None:
    record = {"name": "thing", "depends": ["fixed >=2"], "sha256": "0" * 64}
    mirror.write_index([mirror.File("", "channel/noarch/thing-1.0-0.conda", "0" * 64, 1, record)], tmp_path)
    index = json.loads((tmp_path / "noarch/repodata.json").read_text())
    assert index["packages.conda"]["thing-1.0-0.conda"] == record
