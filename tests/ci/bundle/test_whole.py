"""The real channel, from nothing: what `make channel`, `make env` and `make mirror` make of the tree's own recipes."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import bill_schema
import pytest
import rattler_build
from small_channel import ROOT, differences, tree

from bundle import base, bench, environment_file, install, interpreter, smoke, solving
from bundle.cli import main
from bundle.folders import Folders

VARIABLES = {"PYTHONPATH": f"{ROOT / 'ci'}:{ROOT / 'recipes/bascule-tools/src'}"}
# Named by their files in envs/, each with what its own pip step brings.
ENVIRONMENTS = {"base": (), "pytorch": (), "tensorflow": (), "snapml": ("snapml",), "all": ("snapml",)}
# Whichever test is the first makes all of it, and takes the times.
pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(3000)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Everything, made by the bench, which also trains two steps and reduces without a network."""
    if reason := interpreter.obstacle():
        pytest.skip(reason)
    out = tmp_path_factory.mktemp("whole")
    patch = pytest.MonkeyPatch()
    for name, value in VARIABLES.items():
        patch.setenv(name, value)
    patch.delenv("RATTLER_CACHE_DIR", raising=False)
    where = Folders(ROOT, out / "out")
    bench.run(where, ["--base", base.STAND_IN])
    patch.undo()
    return where


@pytest.fixture(scope="module")
def with_tensorflow(whole: Folders) -> Folders:
    """The same, after TensorFlow was added to the stand-in: what could not be tested without it is."""
    command = [sys.executable, "-m", "bundle", "--out", str(whole.out), "channel", "--base", base.STAND_IN]
    command += ["--frameworks", "pytorch", "tensorflow"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | VARIABLES, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for package in ("bascule-tensorflow", "bascule"):
        assert re.search(rf"channel: {package}-0.1.0-\S+: tested", done.stderr), done.stderr
    assert "not tested" not in done.stderr
    assert "libddl" not in done.stderr  # whose inputs did not change
    return whole


def channels(where: Folders) -> list[str]:
    asked = environment_file.read(ROOT / "envs/pytorch.yaml")
    return solving.channels_of(asked, where, base.remembered(where, None))


def test_every_recipe_is_in_the_channel_and_ddl_for_both_mpis(whole: Folders) -> None:
    files = [path.name for path in whole.channel.glob("*/*.conda")]
    names = {name.split("-0.1.0-")[0] for name in files}
    assert names == {
        "libddl", "libddl-mpi", "ddl", "lms", "lms-torch", "bascule-tools", "bascule-base", "bascule-pytorch",
        "bascule-tensorflow", "bascule",
    }  # fmt: skip
    for package in ("libddl-mpi", "ddl"):
        variants = [re.match(rf"{package}-0\.1\.0-mpi_(openmpi|mpich)_", name) for name in files]
        assert {found[1] for found in variants if found} == {"openmpi", "mpich"}


def test_what_is_compiled_for_a_framework_is_one_file_beside_the_package_that_uses_it(whole: Folders) -> None:
    (path,) = whole.channel.glob("*/lms-torch-0.1.0-*.conda")
    of_the_builder = ("info/", "etc/conda/test-files/lms-torch/")  # with its tests, for whoever runs them again
    files = [name for name in rattler_build.Package.from_file(path).files if not name.startswith(of_the_builder)]
    assert len(files) == 1, files
    assert "site-packages/lms/native/page_pool-torch" in files[0]


def test_the_figures_are_there_with_the_machine(whole: Folders) -> None:
    document = json.loads((whole.out / "bundle.json").read_text())
    figures = {figure["name"]: figure for figure in document["figures"]}
    assert len(figures) == 8
    assert all(figure["seconds"] > 0 for figure in figures.values())
    assert {"wheels", "stand-in channel", "channel"} <= set(figures["channel, from nothing"]["parts"])
    assert document["machine"]["cores"] == os.cpu_count()
    assert document["offline"] is (os.geteuid() == 0)  # only root can leave the network
    assert len(document["load_before"]) == 3


def test_nothing_takes_longer_than_was_promised(whole: Folders) -> None:
    document = json.loads((whole.out / "bundle.json").read_text())
    promised = {figure["name"]: figure for figure in document["figures"] if figure["limit"] is not None}
    assert [figure["limit"] for figure in promised.values()] == [300, 15, 30, 30]
    # Neighbours on the machine make a command wait, which its processor time does not show: a budget for each, and a
    # wait that no neighbours explain is a failure, too.
    cores = document["machine"]["cores"]
    dear = {name: one for name, one in promised.items() if one["processor_seconds"] > cores * one["limit"]}
    assert dear == {}
    busy = max(1.0, document["load_before"][0] / cores)  # of the last minute before it: afterwards it is its own
    late = {name: one for name, one in promised.items() if one["seconds"] > one["limit"] * busy}
    assert late == {}


def test_packages_are_built_and_tested_side_by_side(whole: Folders) -> None:
    document = json.loads((whole.out / "bundle.json").read_text())
    (first,) = (figure for figure in document["figures"] if figure["name"] == "channel, from nothing")
    alone = sum(seconds for name, seconds in first["parts"].items() if ".conda" in name)
    at_once = 1.2 if document["machine"]["cores"] > 1 else 0.8  # one core does one thing at a time
    assert alone > at_once * first["parts"]["channel"]


@pytest.mark.root
def test_two_ranks_reduce_where_there_is_no_network(whole: Folders) -> None:
    if os.geteuid() != 0 or subprocess.run(["unshare", "--net", "--", "true"]).returncode:
        pytest.skip("only root can leave the network")
    command = [*bench.OFFLINE, "ddlrun", "-np", "2", "python", "-c", bench.REDUCE]
    prefix = whole.out / "envs/pytorch"
    done = subprocess.run(command, env=dict(smoke.environment(prefix)), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "2 ranks: right\n"), done.stderr


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_each_environment_is_sound_and_its_bills_are_valid(
    with_tensorflow: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    out, prefix = with_tensorflow.out, tmp_path / "env"
    monkeypatch.delenv("RATTLER_CACHE_DIR", raising=False)  # that of the other installations
    # `env` fails where pip's check, a file of two packages, an allreduce or the framework does.
    assert main(["--out", str(out), "env", name, "--prefix", str(prefix), "--pip"]) == 0
    assert bill_schema.fault(out / f"envs/{name}.cdx.json") is None
    inside = dict(smoke.environment(prefix))
    made = tmp_path / "installed.cdx.json"
    with made.open("w") as file:
        subprocess.run([prefix / "bin/bascule", "sbom"], env=inside, stdout=file, check=True, timeout=60)
    assert bill_schema.fault(made) is None
    of_pip = {one["name"] for one in json.loads(made.read_text())["components"] if one["purl"].startswith("pkg:pypi/")}
    assert set(ENVIRONMENTS[name]) <= of_pip
    ours = json.loads((out / f"envs/{name}.cdx.json").read_text())["components"]
    assert {one["purl"] for one in ours} == {one["purl"] for one in json.loads(made.read_text())["components"]}
    assert bool(of_pip) == bool(ENVIRONMENTS[name])
    said = subprocess.run([prefix / "bin/bascule", "licenses"], env=inside, capture_output=True, text=True, timeout=60)
    assert said.returncode == 0, said.stderr
    assert ("International License Agreement" in said.stdout) == ("snapml" in of_pip)
    assert not list(out.glob("envs/*.lock.txt"))  # they would name the stand-in's packages


def test_whoever_names_no_mpi_gets_open_mpi_and_whoever_names_mpich_gets_mpich(whole: Folders, tmp_path: Path) -> None:
    for specs, expected in ((["ddl"], "openmpi"), (["ddl * mpi_mpich_*"], "mpich"), (["ddl", "mpich"], "mpich")):
        names = {record.name.normalized for record in install.solve(specs, channels(whole))}
        assert {"openmpi", "mpich"} & names == {expected}
    prefix = tmp_path / "mpich"
    install.install(install.solve(["bascule-base", "ddl * mpi_mpich_*"], channels(whole)), prefix)
    smoke.run(prefix, [record.name.normalized for record in install.installed(prefix)])


def test_programs_of_a_long_prefix_run(whole: Folders, tmp_path: Path) -> None:
    prefix = tmp_path
    while len(str(prefix)) < 200:
        prefix = prefix / ("a" * 40)
    prefix.parent.mkdir(parents=True)
    install.install(install.solve(["bascule-pytorch"], channels(whole)), prefix)
    smoke.run(prefix, [record.name.normalized for record in install.installed(prefix)])
    # No file of it still names the folder that it was built in. (Python itself puts a module's place into what it loads
    # of compiled ones, and conda's builders leave these as they are.)
    search = ["grep", "-rlaF", "--exclude=*.pyc", "_placehold_placehold", prefix]
    said = subprocess.run(search, capture_output=True, text=True, timeout=300)
    assert [line for line in said.stdout.splitlines() if "/conda-meta/" not in line] == []


def test_removing_our_packages_and_installing_them_again_leaves_no_trace(whole: Folders, tmp_path: Path) -> None:
    prefix = tmp_path / "env"
    below, all_ = (install.solve(specs, channels(whole)) for specs in (["pytorch", "openmpi"], ["bascule-pytorch"]))
    install.install(below, prefix)
    before = tree(prefix)
    install.install(all_, prefix)
    first = tree(prefix)
    install.install(below, prefix)
    assert differences(before, tree(prefix)) == []
    install.install(all_, prefix)
    assert differences(first, tree(prefix)) == []


@pytest.mark.root
def test_the_mirror_installs_without_a_network(whole: Folders, tmp_path: Path) -> None:
    if os.geteuid() != 0 or subprocess.run(["unshare", "--net", "--", "true"]).returncode:
        pytest.skip("only root can leave the network")
    prefix = tmp_path / "env"
    for mpi in ("openmpi", "mpich"):
        command = ["unshare", "--net", "--", whole.out / "mirror/tools/install_env", "pytorch", prefix, "--mpi", mpi]
        subprocess.run(command, check=True, timeout=600)
        record = next((prefix / "conda-meta").glob("ddl-0*.json"))
        assert f"mpi_{mpi}" in record.name
        shutil.rmtree(prefix)
    for name in ("pytorch-openmpi", "pytorch-mpich"):
        bill = whole.out / f"mirror/sbom/{name}.cdx.json"
        assert bill_schema.fault(bill) is None
        document = json.loads(bill.read_text())
        assert "pytorch" in {component["name"] for component in document["components"]}
