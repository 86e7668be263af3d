"""A mirror of the small channel, and installs from it where there is no network."""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest
from small_channel import ROOT, Small

from bundle import environment_file, mirror, wheels
from bundle.errors import ToolError

pytestmark = pytest.mark.timeout(600)  # the first test makes the small channel

CONTENT = bytes(range(256)) * 4000
VARIANTS = ("small",)  # the small channel has no ddl
NO_NETWORK = ("unshare", "--net", "--")


class Server(ThreadingHTTPServer):
    """Serves CONTENT, and notes what it was asked for. The first answer breaks off where `breaks` says."""

    breaks = 0
    whole = False  # answers a request for a part with everything

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str | None] = []


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.asked.append(wanted)
        start = 0 if wanted is None or self.server.whole else int(wanted.removeprefix("bytes=").rstrip("-"))
        if start >= len(CONTENT):
            self.send_error(416)
            return
        self.send_response(200 if start == 0 else 206)
        self.send_header("Content-Length", str(len(CONTENT) - start))
        self.end_headers()
        end = self.server.breaks or len(CONTENT)
        self.server.breaks = 0
        self.wfile.write(CONTENT[start:end])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as one:
        thread = threading.Thread(target=one.serve_forever)
        thread.start()
        yield one
        one.shutdown()
        thread.join()


def wanted(server: Server, content: bytes = CONTENT) -> mirror.File:
    url = f"http://127.0.0.1:{server.server_port}/noarch/thing-1.0-0.conda"
    return mirror.File(url, "channel/noarch/thing-1.0-0.conda", hashlib.sha256(content).hexdigest(), len(content), {})


def fetched(target: Path, file: mirror.File, suffix: str = "") -> Path:
    """Where it lies before it is part of the mirror."""
    return target / ".fetched" / f"{file.place}{suffix}"


def test_a_download_that_broke_off_goes_on_where_it_was(server: Server, tmp_path: Path) -> None:
    server.breaks = 300_000
    file = wanted(server)
    with pytest.raises(ToolError, match="run this again, and it goes on"):
        mirror.fetch([file], tmp_path)
    part = fetched(tmp_path, file, ".part")
    assert part.stat().st_size == 300_000
    assert not fetched(tmp_path, file).exists()
    mirror.fetch([file], tmp_path)
    assert fetched(tmp_path, file).read_bytes() == CONTENT
    assert server.asked == [None, "bytes=300000-"]
    assert not part.exists()
    mirror.fetch([file], tmp_path)
    assert len(server.asked) == 2


def test_a_server_that_knows_no_parts_begins_again(server: Server, tmp_path: Path) -> None:
    file = wanted(server)
    part = fetched(tmp_path, file, ".part")
    part.parent.mkdir(parents=True)
    part.write_bytes(CONTENT[:1000])
    server.whole = True
    mirror.fetch([file], tmp_path)
    assert fetched(tmp_path, file).read_bytes() == CONTENT


def test_a_part_that_is_all_there_is_only_checked(server: Server, tmp_path: Path) -> None:
    file = wanted(server)
    part = fetched(tmp_path, file, ".part")
    part.parent.mkdir(parents=True)
    part.write_bytes(CONTENT)
    mirror.fetch([file], tmp_path)
    assert fetched(tmp_path, file).read_bytes() == CONTENT


def test_what_an_earlier_run_left_of_another_package_goes(server: Server, tmp_path: Path) -> None:
    folder = tmp_path / "channel/noarch"
    folder.mkdir(parents=True)
    for name in ("thing-0.9-0.conda.part", "thing-0.9-0.conda", "repodata.json"):
        (folder / name).write_text("of the day before")
    mirror.fetch([wanted(server)], tmp_path)
    mirror.settle([wanted(server)], tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == ["repodata.json", "thing-1.0-0.conda"]
    assert (folder / "thing-1.0-0.conda").read_bytes() == CONTENT
    assert sorted(path.name for path in tmp_path.iterdir()) == ["channel"]
    mirror.fetch([wanted(server)], tmp_path)
    assert len(server.asked) == 1  # it is at its place


def test_a_mirror_that_more_is_fetched_for_is_in_order_until_all_is_there(
    server: Server, made: Path, tmp_path: Path
) -> None:
    shutil.copytree(made, target := tmp_path / "mirror")
    more = wanted(server)
    missing = replace(more, url="http://127.0.0.1:9/another-1.0-0.conda", place="channel/noarch/another-1.0-0.conda")
    with pytest.raises(ToolError, match="could not be fetched"):
        mirror.fetch([more, missing], target)
    assert fetched(target, more).is_file()
    done = subprocess.run([target / "verify_mirror"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["all", "snapml"])
def test_an_environment_file_of_the_mirror_needs_no_pip(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.yaml"
    original = environment_file.read(ROOT / f"envs/{name}.yaml")
    path.write_text(mirror.described(original))
    found = environment_file.read(path)
    assert found.channels == ("./channel", "nodefaults")
    assert found.specs == tuple(spec for spec in original.specs if spec != "pip")
    assert found.pip == ()
    assert path.read_text().startswith("# Left out, because it is on no channel: snapml ==1.17.2,")


DEPENDENCIES = """\
name: mine
channels:
  - ./out/channel
  - conda-forge
dependencies:  # of mine
- conda-forge::nilearn >=0.10  # the brain
- "ddl * mpi_mpich_*"
- numpy[version='>=1.26']
- 'mpich'
- pip
- pip:
  - snapml ==1.17.2
"""


def test_no_dependency_is_lost_on_the_way_to_the_machine_without_a_network(tmp_path: Path) -> None:
    path, made = tmp_path / "mine.yaml", tmp_path / "made.yaml"
    path.write_text(DEPENDENCIES)
    made.write_text(mirror.described(environment_file.read(path)))
    specs = ["nilearn >=0.10", "ddl * mpi_mpich_*", "numpy[version='>=1.26']", "mpich"]
    assert list(environment_file.read(made).specs) == specs
    assert install_env().requirements(made) == specs


def test_the_installer_reads_what_it_understands_and_refuses_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    specs = ["conda-forge::nilearn >=0.10", "ddl * mpi_mpich_*", "numpy[version='>=1.26']"]
    whole = DEPENDENCIES.replace("- 'mpich'\n", "")
    for text, more in ((whole, []), (whole.partition("- pip:")[0], ["pip"])):
        path.write_text(text)
        assert install_env().requirements(path) == specs + more
    others = ("- 'mpich'", "-\n    b", "- a\n      b", "- a: b", "- a\n    - b", '- "a')
    for text in ("dependencies: [numpy]", *(f"dependencies:\n  - numpy\n  {other}" for other in others)):
        path.write_text(f"name: mine\n{text}\n")
        with pytest.raises(ValueError, match=rf"^{path}:\d: .* is not understood: write a package a line"):
            install_env().requirements(path)


def install_env() -> ModuleType:
    """The program as a module."""
    loader = SourceFileLoader("install_env", str(ROOT / "ci/install_env"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_the_installers_folder_is_its_own_until_it_fails(tmp_path: Path) -> None:
    claimed = install_env().claimed
    prefix = tmp_path / "some/new/prefix"
    with claimed(prefix), pytest.raises(ValueError, match="exists already: name another folder"), claimed(prefix):
        raise AssertionError
    assert prefix.is_dir()
    shutil.rmtree(tmp_path / "some")

    def interrupted() -> None:
        with claimed(prefix):
            (prefix / "bin").mkdir()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_a_file_with_another_checksum_is_refused_and_not_kept(server: Server, tmp_path: Path) -> None:
    file = wanted(server, b"another")
    with pytest.raises(ToolError, match="Nothing of it was kept"):
        mirror.fetch([file], tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.fixture(scope="module")
def made(small: Small, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mirror of the small environment."""
    wheels.download(["py-rattler"], small.where.tree / "ci/constraints.txt", small.where.work / "wheels")
    target = tmp_path_factory.mktemp("with space") / "the mirror"
    folder = mirror.make(small.where, small.base, ["small"], target, tar=True, variants=VARIANTS)
    assert folder.name == "the mirror.tar"
    return folder.with_suffix("")


def test_a_mirror_passes_its_own_check(made: Path) -> None:
    subprocess.run([sys.executable, made / "verify_mirror"], check=True, timeout=60)


def test_its_tar_holds_the_same(made: Path, tmp_path: Path) -> None:
    subprocess.run(["tar", "--extract", "--file", f"{made}.tar", "--directory", tmp_path], check=True, timeout=60)
    subprocess.run([sys.executable, tmp_path / made.name / "verify_mirror"], check=True, timeout=60)


def test_it_holds_what_the_environment_needs_and_names_only_itself(made: Path) -> None:
    names = {path.name.split("-0")[0].split("-3")[0] for path in made.glob("channel/*/*.conda")}
    assert {"small", "bascule-tools", "python"} <= names
    assert "hatchling" not in " ".join(names)  # needed to build, not to run
    assert (made / "envs/small.yaml").read_text().splitlines()[1:3] == ["channels:", "  - ./channel"]
    assert "conda-forge" not in (made / "envs/small.yaml").read_text()


def test_a_second_run_fetches_nothing(small: Small, made: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in made.glob("channel/*/*.conda")}
    mirror.make(small.where, small.base, ["small"], made, tar=False, variants=VARIANTS)
    assert {path: path.stat().st_mtime_ns for path in made.glob("channel/*/*.conda")} == before


@pytest.mark.parametrize("what", [(mirror, "fetch"), (wheels, "download")])
def test_a_run_that_fails_leaves_what_an_earlier_one_made(
    small: Small, made: Path, monkeypatch: pytest.MonkeyPatch, what: tuple[ModuleType, str]
) -> None:
    before = {path: path.read_bytes() for path in made.rglob("*") if path.is_file()}

    def fail(*_: object) -> None:
        raise ToolError("no route")

    monkeypatch.setattr(*what, fail)
    with pytest.raises(ToolError, match="no route"):
        mirror.make(small.where, small.base, ["small"], made, tar=False, variants=VARIANTS)
    assert {path: path.read_bytes() for path in made.rglob("*") if path.is_file()} == before


def test_a_tar_that_could_not_be_written_leaves_the_old_one(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tar = made.with_name(f"{made.name}.tar")
    before = (tar.stat(), sorted(made.parent.iterdir()))

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tarfile.TarFile.add", full)
    with pytest.raises(OSError, match="No space left"):
        mirror._tar(made)
    assert (tar.stat(), sorted(made.parent.iterdir())) == before


def test_a_tar_that_is_no_mirrors_is_left_alone(small: Small, made: Path, tmp_path: Path) -> None:
    target, tar = tmp_path / made.name, tmp_path / f"{made.name}.tar"
    for content in (b"", b"mine", b"mine" * 5000):
        tar.write_bytes(content)
        with pytest.raises(ToolError, match="is no mirror's, and would be replaced: name another folder"):
            mirror.claim(target, small.where, tar=True)
        assert not target.exists()
    mirror.claim(target, small.where, tar=False)
    with pytest.raises(ToolError, match="would be replaced"):
        mirror.claim(target, small.where, tar=True)  # although the folder is a mirror's now
    shutil.copy(made.with_name(f"{made.name}.tar"), tar)
    mirror.claim(target, small.where, tar=True)


def test_what_a_killed_run_left_beside_the_checksums_is_not_among_them(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made, tmp_path / "mirror")
    (tmp_path / "mirror/.SHA256SUMS.new").write_text("in part")
    mirror.write_sums(tmp_path / "mirror")
    subprocess.run([sys.executable, tmp_path / "mirror/verify_mirror"], check=True, timeout=60)
    assert (tmp_path / "mirror/SHA256SUMS").read_text() == (made / "SHA256SUMS").read_text()


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
    prefix = tmp_path / "a/new/env"
    command = [sys.executable, tmp_path / "mirror/tools/install_env", "small", prefix, "--mpi", "none"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 1
    assert "nothing was left behind" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mirror"]


def test_an_environment_that_the_mirror_lacks_is_named_with_those_it_has(made: Path, tmp_path: Path) -> None:
    command = [sys.executable, made / "tools/install_env", "tensorflow", tmp_path / "env"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "there is no environment 'tensorflow'" in done.stderr
    assert "there are small" in done.stderr


def test_the_index_is_what_the_channel_said_and_not_what_the_packages_say(small: Small, tmp_path: Path) -> None:
    record = {"name": "thing", "depends": ["mended >=2"], "sha256": "0" * 64}
    file = mirror.File("", "channel/noarch/thing-1.0-0.conda", "0" * 64, 1, record)
    mirror.write_index([file], tmp_path / "channel")
    index = json.loads((tmp_path / "channel/noarch/repodata.json").read_text())
    assert index["packages.conda"]["thing-1.0-0.conda"] == record
