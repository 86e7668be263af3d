from pathlib import Path

import pytest

from bundle import rendered, variants
from bundle.base import Base
from bundle.errors import RecipeError
from bundle.folders import Folders

ROOT = Path(__file__).parents[3]


def test_the_trees_own_are_read_as_text_in_the_order_of_the_file() -> None:
    found = variants.read(ROOT / "conda_build_config.yaml")
    assert found["python"] == ["3.11", "3.12", "3.13"]
    assert found["mpi"] == ["openmpi", "mpich"]
    assert "cuda_compiler_version" not in found  # NCCL is found at run time


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("mpi: [openmpi, mpich]\n", 1, "mpi: expected a block list of values; conda-build drops a list in brackets"),
        ('a:\n  - "1"\npython:\n  - 3.10\n', 4, "python: expected text, found '3.10': put it in quotes"),
        ("mpi:\n  - openmpi\nmpi:\n  - mpich\n", 3, "'mpi' stands here for the second time"),
        ("mpi:\n", 1, "mpi: expected a block list"),
        ("mpi:\n  - {\n", 3, "no YAML"),
        ("- mpi\n", 1, "expected variants"),
    ],
)
def test_what_conda_build_would_misread_is_an_error_with_its_line(
    tmp_path: Path, text: str, line: int, message: str
) -> None:
    path = tmp_path / "conda_build_config.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as caught:
        variants.read(path)
    assert str(caught.value).startswith(f"{path}:{line}: {message}")


def test_a_variant_that_no_recipe_uses_is_an_error_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "conda_build_config.yaml"
    path.write_text('python:\n  - "3.11"\nmpi:\n  - mpich\nc_stdlib_verison:\n  - "2.28"\n')
    with pytest.raises(RecipeError) as caught:
        variants.refuse_unused(path, {"mpi"})
    assert str(caught.value) == f"{path}:5: no recipe uses the variant 'c_stdlib_verison'; those used are mpi"
    path.write_text(path.read_text().replace("verison", "version"))
    variants.refuse_unused(path, {"mpi"})


def test_a_variant_is_restricted_to_what_a_channel_has() -> None:
    known = {"python": ["3.11", "3.12"], "mpi": ["mpich"]}
    assert variants.restricted(known, "python", ["3.12", "3.9"]) == {"python": ["3.12"], "mpi": ["mpich"]}


def test_no_other_file_names_a_frameworks_version() -> None:
    known = variants.read(ROOT / "conda_build_config.yaml")
    files = [ROOT / "meta.yaml", *ROOT.glob("recipes/*/meta.yaml"), *ROOT.glob("envs/*.yaml")]
    assert len(files) > 8
    for framework in ("pytorch", "tensorflow"):
        (version,) = known[framework]
        assert [str(path) for path in files if f"{framework} {version}" in path.read_text()] == []


def test_the_pinned_pytorch_is_the_one_that_the_tests_run_on() -> None:
    (version,) = variants.read(ROOT / "conda_build_config.yaml")["pytorch"]
    assert f"\ntorch=={version}." in (ROOT / "ci/constraints.txt").read_text()


def test_a_channel_for_one_mpi_has_no_variant_for_another(tmp_path: Path) -> None:
    base = Base("conda-forge", ("conda-forge",), "a test")
    assert rendered.restricted(Folders(ROOT, tmp_path), base)["mpi"] == ["openmpi", "mpich"]
    assert rendered.restricted(Folders(ROOT, tmp_path, mpi="mpich"), base)["mpi"] == ["mpich"]
    with pytest.raises(RecipeError, match="mpi: there is no mpihc; there are: openmpi, mpich"):
        rendered.restricted(Folders(ROOT, tmp_path, mpi="mpihc"), base)
