"""The real channel, from nothing: what `make channel`, `make env` and `make mirror` make of the tree's own recipes."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import rattler_build
from small_channel import tree

from bundle import base, bench, environment_file, install, interpreter, mirror, smoke
from bundle.folders import Folders

ROOT = Path(__file__).parents[3]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Everything, made by the bench, which also trains two steps and reduces without a network."""
    if reason := interpreter.obstacle():
        pytest.skip(reason)
    out = tmp_path_factory.mktemp("whole")
    patch = pytest.MonkeyPatch()
    patch.setenv("PYTHONPATH", f"{ROOT / 'ci'}:{ROOT / 'recipes/bascule-tools/src'}")
    patch.delenv("RATTLER_CACHE_DIR", raising=False)
    where = Folders(ROOT, out / "out")
    bench.run(where, ["--base", base.STAND_IN])
    patch.undo()
    return where


def channels(where: Folders) -> list[str]:
    asked = environment_file.read(ROOT / "envs/pytorch.yaml")
    return mirror.channels_of(asked, where, base.remembered(where, None))


def test_every_recipe_is_in_the_channel_and_ddl_for_both_mpis(whole: Folders) -> None:
    files = [path.name for path in whole.channel.glob("*/*.conda")]
    names = {name.split("-0.1.0-")[0] for name in files}
    assert names == {
        "libddl", "ddl", "ddl-torch", "lms", "lms-torch", "bascule-tools", "bascule-base", "bascule-pytorch",
        "bascule-tensorflow", "bascule",
    }  # fmt: skip
    for package in ("libddl", "ddl"):
        variants = {name.split("mpi_")[1].split("_")[0] for name in files if name.startswith(f"{package}-0.1.0-mpi_")}
        assert variants == {"openmpi", "mpich"}


def test_what_is_compiled_for_a_framework_is_one_file_beside_the_package_that_uses_it(whole: Folders) -> None:
    for package, place in (("lms-torch", "lms/native/page_pool-torch"), ("ddl-torch", "ddl/native/backend-torch")):
        (path,) = whole.channel.glob(f"*/{package}-0.1.0-*.conda")
        files = [name for name in rattler_build.Package.from_file(path).files if not name.startswith("info/")]
        assert len(files) == 1, files
        assert f"site-packages/{place}" in files[0]


def test_the_figures_are_there_with_the_machine(whole: Folders) -> None:
    document = json.loads((whole.out / "bundle.json").read_text())
    assert len(document["figures"]) == 7
    assert all(figure["seconds"] > 0 for figure in document["figures"])
    assert document["machine"]["cores"] == os.cpu_count()


def test_the_environment_passes_its_smoke_test(whole: Folders) -> None:
    prefix = whole.out / "envs/pytorch"
    smoke.run(prefix, [record.name.normalized for record in install.installed(prefix)])


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
    install.install(install.solve(["bascule-base"], channels(whole)), prefix)
    smoke.run(prefix, [record.name.normalized for record in install.installed(prefix)])


def test_removing_our_packages_and_installing_them_again_leaves_no_trace(whole: Folders, tmp_path: Path) -> None:
    prefix = tmp_path / "env"
    below, all_ = (install.solve(specs, channels(whole)) for specs in (["pytorch", "openmpi"], ["bascule-pytorch"]))
    install.install(below, prefix)
    before = tree(prefix)
    install.install(all_, prefix)
    first = tree(prefix)
    install.install(below, prefix)
    assert sorted(set(tree(prefix)) ^ set(before)) == []
    install.install(all_, prefix)
    assert sorted(set(tree(prefix)) ^ set(first)) == []


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
        document = json.loads((whole.out / f"mirror/sbom/{name}.cdx.json").read_text())
        assert "pytorch" in {component["name"] for component in document["components"]}
