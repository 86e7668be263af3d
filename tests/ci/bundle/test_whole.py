"""The real channel, from nothing: what `make channel`, `make env` and `make mirror` make of the tree's own recipes."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import bill_schema
import pytest
import rattler_build
from small_channel import ROOT

from bundle import base, channel, environment_file, install, interpreter, smoke, stand_in
from bundle.cli import main
from bundle.folders import Folders

ENVIRONMENTS = sorted(path.stem for path in (ROOT / "envs").glob("*.yaml"))
NO_NETWORK = ("unshare", "--net", "--", "sh", "-c", 'PATH=$PATH:/usr/sbin:/sbin ip link set lo up && exec "$@"', "sh")
REDUCE = """
import ddl, numpy
ddl.init()
values = numpy.full(1_000_003, ddl.rank() + 1.0)
ddl.allreduce(values)
assert (values == 3).all()
"""
# Whichever test is the first makes all of it.
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(3000)]


def make(where: Folders, *words: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RATTLER_CACHE_DIR", raising=False)
        assert main(["--out", str(where.out), *words]) == 0


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """The channel, an environment and a mirror."""
    if reason := interpreter.obstacle():
        pytest.skip(reason)
    where = Folders(ROOT, tmp_path_factory.mktemp("whole") / "out")
    make(where, "channel", "--base", base.STAND_IN)
    make(where, "env", "pytorch")
    make(where, "mirror", "pytorch")
    return where


@pytest.fixture(scope="module")
def with_tensorflow(whole: Folders) -> Folders:
    """The same, after TensorFlow was added to the stand-in: what could not be tested without it is."""
    before = {path.name: path.stat().st_ino for path in whole.channel.glob("*/*.conda")}
    make(whole, "channel", "--base", base.STAND_IN, "--frameworks", *stand_in.FRAMEWORKS)
    after = {path.name: path.stat().st_ino for path in whole.channel.glob("*/*.conda")}
    assert after == before  # nothing was built again
    state = json.loads((whole.work / "state.json").read_text())
    assert all("tested" in one for one in state.values())
    return whole


def channels(where: Folders) -> list[str]:
    return [where.channel.as_uri(), base.remembered(where).address]


def test_what_is_compiled_for_a_framework_is_all_that_its_package_holds(whole: Folders) -> None:
    (path,) = whole.channel.glob("*/bascule-lms-torch-0.1.0-*.conda")
    of_the_builder = ("info/", "etc/conda/test-files/")  # with its tests, for whoever runs them again
    files = [name for name in rattler_build.Package.from_file(path).files if not name.startswith(of_the_builder)]
    names = [re.sub(r".*/lms/native/(\w+)-torch.*", r"\1", name) for name in files]
    assert sorted(names) == ["native_hooks", "page_pool"]


@pytest.mark.root
def test_two_ranks_reduce_where_there_is_no_network(whole: Folders) -> None:
    if os.geteuid() != 0 or subprocess.run(["unshare", "--net", "--", "true"]).returncode:
        pytest.skip("only root can leave the network")
    command = [*NO_NETWORK, "ddlrun", "-np", "2", "python", "-c", REDUCE]
    inside = dict(smoke.environment(whole.out / "envs/pytorch"))
    subprocess.run(command, env=inside, check=True, timeout=60)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_each_environment_is_sound_and_its_bills_are_valid(
    with_tensorflow: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    out, prefix = with_tensorflow.out, tmp_path / "env"
    monkeypatch.delenv("RATTLER_CACHE_DIR", raising=False)  # that of the other installations
    # `env` fails if pip's check, a file of two packages, an allreduce or the framework does.
    assert main(["--out", str(out), "env", name, "--prefix", str(prefix), "--pip"]) == 0
    assert bill_schema.fault(out / f"envs/{name}.cdx.json") is None
    inside = dict(smoke.environment(prefix))
    made = tmp_path / "installed.cdx.json"
    with made.open("w") as file:
        subprocess.run([prefix / "bin/bascule", "sbom"], env=inside, stdout=file, check=True, timeout=60)
    assert bill_schema.fault(made) is None
    of_pip = {one["name"] for one in json.loads(made.read_text())["components"] if one["purl"].startswith("pkg:pypi/")}
    step = environment_file.read(ROOT / f"envs/{name}.yaml").pip
    assert {line.split()[0] for line in step} <= of_pip
    ours = json.loads((out / f"envs/{name}.cdx.json").read_text())["components"]
    assert {one["purl"] for one in ours} == {one["purl"] for one in json.loads(made.read_text())["components"]}
    assert bool(of_pip) == bool(step)
    said = subprocess.run([prefix / "bin/bascule", "licenses"], env=inside, capture_output=True, text=True, timeout=60)
    assert said.returncode == 0, said.stderr
    assert ("International License Agreement" in said.stdout) == ("snapml" in of_pip)
    assert not list(out.glob("envs/*.lock.txt"))  # they would name the stand-in's packages


def test_whoever_names_no_mpi_gets_open_mpi_and_whoever_names_mpich_gets_mpich(whole: Folders, tmp_path: Path) -> None:
    for specs, expected in (
        (["bascule-ddl"], "openmpi"),
        (["bascule-ddl", "libddl-mpi * mpi_mpich_*"], "mpich"),
        (["bascule-ddl", "mpich"], "mpich"),
    ):
        names = {record.name.normalized for record in channel.solve(specs, channels(whole))}
        assert {"openmpi", "mpich"} & names == {expected}
    prefix = tmp_path / "mpich"
    install.install(channel.solve(["bascule-base", "libddl-mpi * mpi_mpich_*"], channels(whole)), prefix)
    smoke.run(prefix, [record.name.normalized for record in install.installed(prefix)])


def test_programs_of_a_long_prefix_run(whole: Folders, tmp_path: Path) -> None:
    prefix = tmp_path
    while len(str(prefix)) < 200:
        prefix = prefix / ("a" * 40)
    prefix.parent.mkdir(parents=True)
    install.install(channel.solve(["bascule-pytorch"], channels(whole)), prefix)
    smoke.run(prefix, [record.name.normalized for record in install.installed(prefix)])
    # No file of it still names the folder that it was built in. (Python itself puts a module's place into what it loads
    # of compiled ones, and conda's builders leave these as they are.)
    search = ["grep", "-rlaF", "--exclude=*.pyc", "_placehold_placehold", prefix]
    said = subprocess.run(search, capture_output=True, text=True, timeout=300)
    assert [line for line in said.stdout.splitlines() if "/conda-meta/" not in line] == []


@pytest.mark.root
def test_the_mirror_installs_without_a_network(whole: Folders, tmp_path: Path) -> None:
    if os.geteuid() != 0 or subprocess.run(["unshare", "--net", "--", "true"]).returncode:
        pytest.skip("only root can leave the network")
    prefix = tmp_path / "env"
    for mpi in ("openmpi", "mpich"):
        command = ["unshare", "--net", "--", whole.out / "mirror/tools/install_env", "pytorch", prefix, "--mpi", mpi]
        subprocess.run(command, check=True, timeout=600)
        record = next((prefix / "conda-meta").glob("libddl-mpi-0*.json"))
        assert f"mpi_{mpi}" in record.name
        shutil.rmtree(prefix)
    for name in ("pytorch-openmpi", "pytorch-mpich"):
        bill = whole.out / f"mirror/sbom/{name}.cdx.json"
        assert bill_schema.fault(bill) is None
        document = json.loads(bill.read_text())
        assert "pytorch" in {component["name"] for component in document["components"]}
