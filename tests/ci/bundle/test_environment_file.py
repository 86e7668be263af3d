from pathlib import Path

import pytest

from bundle import environment_file, stand_in
from bundle.errors import BundleError

ROOT = Path(__file__).parents[3]
RIGHT = "name: x\nchannels:\n  - a\ndependencies:\n  - b >=1\n  - pip\n  - pip:\n      - c ==2\n"


@pytest.mark.parametrize("path", sorted((ROOT / "envs").glob("*.yaml")), ids=lambda path: path.stem)
def test_each_environment_of_the_tree_names_its_bundle_and_both_channels(path: Path) -> None:
    asked = environment_file.read(path)
    version = (ROOT / "VERSION").read_text().strip()
    (bundle,) = (spec.split()[0] for spec in asked.specs if spec.startswith("bascule"))
    assert asked.specs[0] == f"{bundle} =={version}"
    assert f"- name: {bundle}\n" in (ROOT / "meta.yaml").read_text()
    assert asked.channels == ("./out/channel", "conda-forge")
    frameworks = [
        one
        for one in stand_in.FRAMEWORKS
        if bundle in ("bascule", "bascule-tune" if one == "pytorch" else "") or bundle.endswith(f"-{one}")
    ]
    assert asked.frameworks() == frameworks
    assert frameworks or bundle in ("bascule-base", "bascule-linear-models")
    # IBM's is in the user's own pip step alone, and its licence is named.
    assert [line.split()[0] for line in asked.pip] == ["snapml"] * (path.stem in ("snapml", "all"))
    assert "snapml" not in " ".join(asked.specs)
    assert not asked.pip or "IBM" in path.read_text()


def test_no_recipe_names_snapml() -> None:
    recipes = [ROOT / "meta.yaml", *ROOT.glob("recipes/*/recipe.yaml")]
    assert [str(path) for path in recipes if "snapml" in path.read_text()] == []


def test_a_file_is_read_with_its_pip_step(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(RIGHT)
    asked = environment_file.read(path)
    assert (asked.name, asked.channels, asked.specs, asked.pip) == ("x", ("a",), ("b >=1", "pip"), ("c ==2",))
    assert asked.of_conda(with_pip=False) == ["b >=1"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("channels:", "chanels:", "channels"),
        ("name: x\n", "", "name"),
        ("dependencies:", "prefix: y\ndependencies:", "expected name, channels and dependencies"),
        ("  - pip:\n      - c ==2\n", "  - npm:\n      - c\n", "pip"),
        ("name: x", "name: [x", "line 2"),
        ("- b >=1", "- 1.0", "which are text"),
        ("- c ==2", "- -r more.txt", "pip: "),
        ("- c ==2", "- --extra-index-url https://a/b", "leave pip's options to PIP_"),
    ],
)
def test_what_conda_would_ignore_or_refuse_is_an_error_that_names_the_file(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = tmp_path / "x.yaml"
    assert old in RIGHT
    path.write_text(RIGHT.replace(old, new))
    with pytest.raises(BundleError) as caught:
        environment_file.read(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


def test_an_environment_that_is_not_there_says_which_are(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").touch()
    with pytest.raises(BundleError, match="there are mine"):
        environment_file.read(tmp_path / "yours.yaml")
