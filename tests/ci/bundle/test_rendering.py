import copy
import re
from pathlib import Path
from typing import Any

import pytest
import rattler_build
import yaml
from conda_words import translated

from bundle import rendering, variants
from bundle.errors import RecipeError

ROOT = Path(__file__).parents[3]
GOLDEN = sorted(Path(__file__).with_name("golden").glob("*.yaml"))


def recipe_of(name: str) -> Path:
    return ROOT / "meta.yaml" if name == "bundle" else ROOT / "recipes" / name / "meta.yaml"


def rendered(path: Path, folder: Path) -> list[dict[str, Any]]:
    """Every variant that rattler-build makes of a recipe on linux-64, in conda-build's words."""
    document = rendering.render(path, variants.read(ROOT / "conda_build_config.yaml"))
    recipe = rattler_build.Stage0Recipe.from_dict(document, recipe_dir=folder)
    platform = rattler_build.PlatformConfig(target_platform="linux-64")
    found = recipe.render(
        rattler_build.VariantConfig.from_conda_build_config(
            ROOT / "conda_build_config.yaml", rattler_build.JinjaConfig(platform=platform)
        ),
        rattler_build.RenderConfig(platform=platform),
    )
    made = []
    for one in found:
        assert one.hash_info is not None
        made.append(translated(copy.deepcopy(one.recipe.to_dict()), one.variant, one.hash_info.hash))
    return made


# What only conda-build is told: it copies the recipe's folder into each package, which our copies of recipes are not.
ONLY_CONDA_BUILDS = {"include_recipe": False}
# conda-build writes no hash where a package uses no variant (metadata.py: get_hash_contents, build_id); rattler-build
# always does.
WITH_A_HASH = {"0": "hHASH_0", "py_0": "pyhHASH_0"}


def by_build(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    named = {f"{one['package']['name']} {one['build']['string']}": one for one in documents}
    assert len(named) == len(documents)
    return named


def test_every_recipe_has_its_golden_rendering() -> None:
    recipes = {path.parent.name for path in ROOT.glob("recipes/*/meta.yaml")} | {"bundle"}
    assert {path.stem for path in GOLDEN} == recipes


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: str(path.stem))
def test_a_recipe_renders_key_for_key_as_conda_build_documents_it(golden: Path, tmp_path: Path) -> None:
    documents = yaml.safe_load(golden.read_text())
    for one in documents:
        one["build"]["string"] = WITH_A_HASH.get(one["build"]["string"], one["build"]["string"])
    expected = by_build(documents)
    found = by_build(rendered(recipe_of(golden.stem), tmp_path))
    assert sorted(found) == sorted(expected)
    for name, one in expected.items():
        told = {key: one["build"].pop(key) for key in ONLY_CONDA_BUILDS if key in one["build"]}
        assert told == (ONLY_CONDA_BUILDS if golden.stem == "bundle" else {})
        assert found[name] == one, name


RECIPE = """\
{% set version = "1.0" %}
package:
  name: thing
  version: {{ version }}
build:
  number: 0
requirements:
  run:
    - python
about:
  license: MIT
"""


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("  number: 0", "  nubmer: 0", 6, "'nubmer' is no key of build here; there are number, string"),
        ("  run:", "  rum:", 8, "'rum' is no key of requirements"),
        ("about:", "abuot:", 10, "'abuot' is no key of a recipe"),
        ("  name: thing", "  nmae: thing", 3, "'nmae' is no key of package"),
        ("  number: 0", "  number: one", 6, "number: expected a whole number, found 'one'"),
        ("  number: 0", "  noarch: pyhton", 6, "noarch: expected one of python, generic"),
        ("  number: 0", "  include_recipe: true", 6, "include_recipe: expected false"),
        ("  number: 0", "  skip: true", 6, "skip: expected `true` with a selector"),
        ("  number: 0", "  skip: true  # [windows]", 6, "'windows' is no platform; there are linux, osx, win"),
        ("    - python", "    - python  # [linux and]", 9, "selector [linux and] is no expression"),
        ("  license: MIT", "  license: MIT  # [linux]", 11, "a selector is understood on an item of a list"),
        ("{{ version }}", "{{ versoin }}", 4, "'versoin' is not defined; there are"),
        ("{{ version }}", "{{ environ.get('X') }}", 4, "call is not in the subset"),
        ("{{ version }}", "{{ version", 4, "must begin and end on one line"),
        ("{{ version }}", "{{ pin_subpackge('thing') }}", 4, "function 'pin_subpackge' is not known"),
        ("{{ version }}", "{{ pin_subpackage('a', maxpin='x') }}", 4, "has no argument 'maxpin'; there are min_pin"),
        ("{{ version }}", "{{ version | upper }}", 4, "filter is not in the subset"),
        ("{% set version", "{% if version", 1, "only `{% set NAME = EXPRESSION %}`"),
        ("    - python", "    python", 8, "run: expected a block list"),
        (
            "  run:\n    - python",
            "  run: [python]",
            8,
            "conda-build takes brackets at the end of a line for a selector",
        ),
        ("    - python", "    - python  # as told [1]", 9, "conda-build takes brackets"),
        ("    - python", "    - test -f [x]", 9, "conda-build takes brackets"),
        ("  license: MIT", "  license: MIT\n  license: BSD", 12, "'license' stands here for the second time"),
        ("about:", "  host\nabout:", 11, "no YAML"),
        ("  version: {{ version }}\n", "", 3, "version: is missing"),
    ],
)
def test_a_typo_is_an_error_with_file_and_line(tmp_path: Path, old: str, new: str, line: int, message: str) -> None:
    path = tmp_path / "meta.yaml"
    assert RECIPE.count(old) == 1
    path.write_text(RECIPE.replace(old, new))
    with pytest.raises(RecipeError) as caught:
        rendering.render(path, {"python"})
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert message in str(caught.value)


def test_a_recipe_that_is_right_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "meta.yaml"
    path.write_text(RECIPE)
    assert rendering.render(path, {"python"})["package"] == {"name": "thing", "version": "${{ version }}"}


def test_a_selected_item_becomes_a_condition(tmp_path: Path) -> None:
    path = tmp_path / "meta.yaml"
    path.write_text(RECIPE.replace("    - python", '    - python\n    - thing  # [linux and not mpi == "mpich"]'))
    run = rendering.render(path, {"python", "mpi"})["requirements"]
    assert run == {"run": ["python", {"if": '(linux) and (not (mpi == "mpich"))', "then": "thing"}]}


def test_a_bare_python_of_run_is_pinned_to_the_one_of_host(tmp_path: Path) -> None:
    path = tmp_path / "meta.yaml"
    path.write_text(RECIPE.replace("  run:", "  host:\n    - python\n  run:"))
    made = rendering.render(path, {"python"})["requirements"]
    assert isinstance(made, dict)
    assert made["run"] == ['${{ pin_compatible("python", lower_bound="x.x", upper_bound="x.x") }}']
    path.write_text(path.read_text().replace("  number: 0", "  number: 0\n  noarch: python"))
    made = rendering.render(path, {"python"})["requirements"]
    assert isinstance(made, dict)
    assert made["run"] == ["python"]


def test_a_name_that_conda_build_takes_for_the_variant_python_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "meta.yaml"
    path.write_text('{% set python_least = "3.11" %}\n' + RECIPE)
    with pytest.raises(RecipeError, match=r":1: 'python_least' begins with python"):
        rendering.render(path, {"python"})


def test_both_places_that_tell_how_conda_build_is_called_name_recipes_before_what_needs_them() -> None:
    told = [
        re.findall(r"conda build (?:-m \S+ )?([^\n`]*?)(?:  |\n)", (ROOT / name).read_text())
        for name in ("meta.yaml", "docs/conda.md")
    ]
    assert told == [["recipes/* ."], ["recipes/* ."]]


def test_skip_becomes_the_condition_under_which_nothing_is_built(tmp_path: Path) -> None:
    path = tmp_path / "meta.yaml"
    path.write_text(RECIPE.replace("  number: 0", "  number: 0\n  skip: true  # [win or osx]"))
    assert rendering.render(path, {"python"})["build"] == {"number": 0, "skip": ["(win) or (osx)"]}
    for name in ("libddl", "libddl-mpi", "ddl", "lms-torch"):  # those that are compiled
        build = rendering.render(recipe_of(name), variants.read(ROOT / "conda_build_config.yaml"))["build"]
        assert isinstance(build, dict)
        assert build["skip"] == ["(win) or (osx)"]


def test_what_a_package_is_compiled_against_is_in_its_hash(tmp_path: Path) -> None:
    """Golden renderings have HASH in its place: here it is looked at."""
    known = variants.read(ROOT / "conda_build_config.yaml")

    def strings(known: dict[str, list[str]]) -> set[str]:
        document = rendering.render(recipe_of("lms-torch"), known)
        recipe = rattler_build.Stage0Recipe.from_dict(document, recipe_dir=tmp_path)
        target = rattler_build.RenderConfig(platform=rattler_build.PlatformConfig(target_platform="linux-64"))
        return {str(one.recipe.build.string) for one in recipe.render(rattler_build.VariantConfig(known), target)}

    first = strings(known)
    assert strings(known) == first
    assert not strings({**known, "pytorch": ["2.14"]}) & first
    assert not strings({**known, "c_stdlib_version": ["2.34"]}) & first
    assert strings({**known, "tensorflow": ["9"]}) == first


def test_lines_of_an_error_count_the_files_own(tmp_path: Path) -> None:
    path = tmp_path / "meta.yaml"
    path.write_text("# a comment\n\n" + RECIPE.replace("number", "nubmer"))
    with pytest.raises(RecipeError, match=r":8: 'nubmer'"):
        rendering.render(path, {"python"})
