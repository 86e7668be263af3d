import itertools

import pytest

from bundle import selector

NAMES = ("mpi", "python")


@pytest.mark.parametrize(
    "text",
    [
        "linux",
        "not win",
        "linux and not aarch64",
        "linux or osx and aarch64",
        "(linux or osx) and aarch64",
        "not (linux or osx)",
        "not linux or osx",
        'linux and mpi == "mpich"',
        'not mpi == "mpich" and linux',
        'mpi != "mpich" or not (linux and aarch64)',
    ],
)
def test_it_holds_for_the_same_platforms_and_variants_in_both(text: str) -> None:
    translated = selector.translate(text, NAMES)
    for linux, osx, win, aarch64, mpi in itertools.product(*[(True, False)] * 4, ("openmpi", "mpich")):
        where = {"linux": linux, "osx": osx, "win": win, "aarch64": aarch64, "mpi": mpi}
        # Both are written in a part of Python's own expressions.
        assert eval(translated, {}, where) == eval(text, {}, where), (translated, where)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("linux and", "is no expression"),
        ("windows", "'windows' is no platform; there are linux"),
        ('mip == "mpich"', "'mip' is no variant; there are mpi, python"),
        ("python < 3.12", "is not in the subset"),
        ("mpi == 1", "is not in the subset"),
        ("environ.get('X')", "is not in the subset"),
    ],
)
def test_what_is_not_understood_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        selector.translate(text, NAMES)
