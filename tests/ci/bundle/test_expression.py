"""What an expression stands for is the same before and after its translation: conda-build's Jinja, rattler-build's."""

from pathlib import Path

import jinja2
import pytest
import rattler_build

from bundle import expression

PLATFORM = "linux-64"
NAMES = {"mpi": ["mpich", "openmpi"], "version": ["1.2"]}


def as_conda_build(text: str) -> list[str]:
    """For each MPI, what Jinja makes of it."""
    template = jinja2.Environment(autoescape=False).from_string("{{ " + text + " }}")
    return [template.render(mpi=mpi, version="1.2") for mpi in NAMES["mpi"]]


def as_rattler_build(text: str, folder: Path) -> list[str]:
    """For each MPI, what rattler-build makes of the translation."""
    translated = expression.translate(text, NAMES)
    document = {
        "package": {"name": "thing", "version": "1"},
        "build": {"string": "${{ mpi }}"},
        "about": {"summary": "is ${{ " + translated + " }}"},
    }
    target = rattler_build.RenderConfig(platform=rattler_build.PlatformConfig(target_platform=PLATFORM))
    recipe = rattler_build.Stage0Recipe.from_dict(document, recipe_dir=folder)
    found = [one.recipe for one in recipe.render(rattler_build.VariantConfig(NAMES), target)]
    by_mpi = {str(one.build.string): one.to_dict()["about"]["summary"].removeprefix("is ") for one in found}
    return [by_mpi[mpi] for mpi in NAMES["mpi"]]


@pytest.mark.parametrize(
    "text",
    [
        '100 if mpi == "openmpi" else 0',
        '(100 if mpi == "openmpi" else 0) + 1',
        '100 if mpi == "openmpi" else 0 + 1',
        '100 if mpi == "openmpi" else (1 if mpi == "mpich" else 2)',
        '(100 if mpi == "openmpi" else 1) if mpi != "mpich" else 2',
        "10 - (3 - 2)",
        "10 - 3 - 2",
        "10 + 3 - (2 + 1)",
        '("a" if mpi == "openmpi" else "b") ~ "c"',
        '"a" if mpi == "openmpi" else "b" ~ "c"',
        '"a" ~ ("b" ~ mpi) ~ 1',
        "1 ~ (2 + 3)",
        '(1 ~ 2) == "12"',
        '("x" ~ mpi) == "xmpich"',
        "'it' ~ version",
    ],
)
def test_it_stands_for_the_same_in_both(text: str, tmp_path: Path) -> None:
    # A truth value is True in one and true in the other.
    assert [one.lower() for one in as_rattler_build(text, tmp_path)] == [one.lower() for one in as_conda_build(text)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("-1", "neg is not in the subset"),  # not the mark "{{-" before a 1
        ("- version", "neg is not in the subset"),
        ("+ 1", "pos is not in the subset"),
        ("version -", "is no Jinja expression"),
        ("not mpi", "not is not in the subset"),
        ("mpi | upper", "filter is not in the subset"),
        ("1 if mpi", "found no else"),
        ("2 * 3", "mul is not in the subset"),
        ('mpi == "a" == "b"', "compare is not in the subset"),
        ("none", "const is not in the subset"),
        ("nmae", "'nmae' is not defined; there are CONDA_PY"),
        ("compiler", r"compiler is a function: compiler\(...\)"),
        ("""'say "a"'""", "a string with quotes or backslashes"),
        ("version }}{{ version", "expected one expression"),
    ],
)
def test_what_is_not_understood_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        expression.translate(text, NAMES)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('compiler("cxx")', 'compiler("cxx")'),
        ('pin_subpackage("a" ~ mpi, exact=True)', 'pin_subpackage("a" ~ mpi, exact=true)'),
        ('pin_compatible("a", min_pin="x.x", max_pin="x")', 'pin_compatible("a", lower_bound="x.x", upper_bound="x")'),
        ('"py" ~ CONDA_PY', '"py" ~ (python | version_to_buildstring)'),
        ("PKG_HASH", "hash"),
    ],
)
def test_names_and_functions_of_conda_build_become_rattler_builds(text: str, expected: str) -> None:
    assert expression.translate(text, NAMES) == expected


def test_a_constant_is_known_by_its_quotes() -> None:
    assert expression.constant(" '1.0' ") == "1.0"
    assert expression.constant('"a" ~ "b"') is None
    assert expression.constant("version") is None
