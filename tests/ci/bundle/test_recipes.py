"""The tree's own recipes, as the builder renders them: names, variants and what conda-forge expects of a recipe."""

import re
from pathlib import Path

import pytest
import yaml
from small_channel import PLATFORM, ROOT

from bundle import recipes
from bundle.folders import Folders

RECIPES = sorted(ROOT.glob("recipes/*/recipe.yaml"))


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> list[recipes.Package]:
    where = Folders(ROOT, tmp_path_factory.mktemp("out"))
    return recipes.packages(where, PLATFORM, recipes.variants(where, {"python": ["3.11"]}))


def test_each_package_has_the_name_that_users_know(packages: list[recipes.Package]) -> None:
    files = sorted(re.sub(r"h[0-9a-f]{7}", "hHASH", one.place) for one in packages if one.recipe in RECIPES)
    assert files == [
        "linux-64/bascule-lms-torch-0.1.0-py311hHASH_0.conda",
        "linux-64/libddl-0.1.0-hHASH_0.conda",
        "linux-64/libddl-mpi-0.1.0-mpi_mpich_hHASH_0.conda",
        "linux-64/libddl-mpi-0.1.0-mpi_openmpi_hHASH_100.conda",
        "noarch/bascule-caffe-0.1.0-pyhHASH_0.conda",
        "noarch/bascule-ddl-0.1.0-pyhHASH_0.conda",
        "noarch/bascule-glm-0.1.0-pyhHASH_0.conda",
        "noarch/bascule-lms-0.1.0-pyhHASH_0.conda",
        "noarch/bascule-tools-0.1.0-pyhHASH_0.conda",
    ]


def test_a_metapackage_requires_what_the_top_level_recipe_says(packages: list[recipes.Package]) -> None:
    runs = {one.name: one.runs_with for one in packages if one.recipe.parent.name == "metapackages"}
    assert runs["bascule-pytorch"] == {"bascule-base", "pytorch", "bascule-lms-torch"}
    assert runs["bascule"] == {"bascule-pytorch", "bascule-tensorflow"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.parent.name)
def test_a_recipe_keeps_conda_forges_conventions(path: Path) -> None:
    recipe = yaml.safe_load(path.read_text())
    folders = [(path.parent / one["path"]).is_dir() for one in recipe["source"]]
    assert folders == sorted(folders, reverse=True)  # a folder before the files that go into it
    runs, host = (recipe["requirements"].get(key, []) for key in ("run", "host"))
    if recipe["build"].get("noarch") == "python":
        assert "__linux" in runs
        assert "python >=${{ python_min }}" in runs
        assert "python ${{ python_min }}.*" in host
        for test in recipe["tests"]:  # with the oldest
            wanted = test["python"]["python_version"] if "python" in test else test["requirements"]["run"][0]
            assert wanted.removeprefix("python ") == "${{ python_min }}.*"
    else:
        assert recipe["build"]["skip"] == ["not linux"]
    script = path.with_name("build.sh")
    if script.is_file() and "cmake" in script.read_text():
        assert "${CMAKE_ARGS:-}" in script.read_text()
        assert "cmake --install" in script.read_text()


def test_every_list_of_variants_is_text_in_a_block() -> None:
    text = (ROOT / "conda_build_config.yaml").read_text()
    assert all(isinstance(one, str) for values in yaml.safe_load(text).values() for one in values)
    assert "[" not in re.sub(r"#.*", "", text)  # which conda-build reads as a selector, and drops
