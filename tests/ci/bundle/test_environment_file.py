from pathlib import Path

import pytest

from bundle import environment_file
from bundle.errors import RecipeError

ROOT = Path(__file__).parents[3]
RIGHT = "name: x\nchannels:\n  - a\ndependencies:\n  - b >=1\n  - pip\n  - pip:\n      - c ==2\n"


@pytest.mark.parametrize("name", ["base", "pytorch", "tensorflow", "snapml", "all"])
def test_each_environment_of_the_tree_names_its_bundle_and_both_channels(name: str) -> None:
    asked = environment_file.read(ROOT / "envs" / f"{name}.yaml")
    bundle = {"snapml": "bascule-base", "all": "bascule"}.get(name, f"bascule-{name}")
    assert f"{bundle} ==0.1.0" in asked.specs
    assert asked.channels == ("./out/channel", "conda-forge", "nodefaults")


def test_there_are_no_others() -> None:
    assert {path.stem for path in (ROOT / "envs").glob("*.yaml")} == {"base", "pytorch", "tensorflow", "snapml", "all"}


@pytest.mark.parametrize("name", ["snapml", "all"])
def test_snapml_is_only_in_the_users_pip_step_and_its_licence_is_named(name: str) -> None:
    path = ROOT / "envs" / f"{name}.yaml"
    asked = environment_file.read(path)
    assert [line.split()[0] for line in asked.pip] == ["snapml"]
    assert "snapml" not in " ".join(asked.specs)
    assert "IBM" in path.read_text()


def test_no_recipe_names_snapml() -> None:
    recipes = [ROOT / "meta.yaml", *ROOT.glob("recipes/*/meta.yaml")]
    assert [str(path) for path in recipes if "snapml" in path.read_text()] == []


def test_a_file_is_read_with_its_pip_step(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(RIGHT)
    asked = environment_file.read(path)
    assert (asked.name, asked.channels, asked.specs, asked.pip) == ("x", ("a",), ("b >=1", "pip"), ("c ==2",))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("channels:", "chanels:", ":2: 'chanels' is no key here; there are name, channels, dependencies"),
        ("name: x\n", "", ":1: name: missing"),
        ("  - pip:\n      - c ==2\n", "  - npm:\n      - c\n", ":7: dependencies: expected a package"),
        ("  - a\n", "  a\n", ":3: channels: expected a list"),
        ("name: x", "name: [x", ":2: no YAML"),
        (
            "- c ==2",
            "- -r more.txt",
            ":8: pip: expected a package's name, with its version or not, found '-r more.txt'",
        ),
        ("- c ==2", "- --extra-index-url https://a/b", ":8: pip: expected a package's name"),
        ("- c ==2", "- c: 2", ":8: pip: expected a package's name"),
    ],
)
def test_what_conda_would_ignore_or_refuse_is_an_error_with_its_line(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = tmp_path / "x.yaml"
    assert old in RIGHT
    path.write_text(RIGHT.replace(old, new))
    with pytest.raises(RecipeError) as caught:
        environment_file.read(path)
    assert str(caught.value).startswith(f"{path}{message}")


def test_an_environment_that_is_not_there_says_which_are(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").touch()
    with pytest.raises(RecipeError, match="there are mine"):
        environment_file.read(tmp_path / "yours.yaml")
