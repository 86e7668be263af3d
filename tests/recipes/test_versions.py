"""One version for all that is released together."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLACES = {
    "meta.yaml": r'set version = "(.*?)"',
    "recipes/*/meta.yaml": r'set version = "(.*?)"',
    "recipes/*/pyproject.toml": r'(?m)^version = "(.*?)"',
    "lms/pyproject.toml": r'(?m)^version = "(.*?)"',
    "ddl/pyproject.toml": r'(?m)^version = "(.*?)"',
    "ddl/CMakeLists.txt": r"project\(ddl VERSION (\S+)",
    "ddl/src/ddl/__init__.py": r'__version__ = "(.*?)"',
    "envs/*.yaml": r"(?m)^  - bascule\S* ==(\S+)",
    "envs/chart/Chart.yaml": r"(?m)^(?:appVersion|version): (\S+)",
}


@pytest.mark.parametrize("place", PLACES)
def test_each_place_names_the_version_of_all(place: str) -> None:
    (expected,) = re.findall(PLACES["meta.yaml"], (ROOT / "meta.yaml").read_text())
    files = sorted(ROOT.glob(place))
    assert files
    for file in files:
        assert set(re.findall(PLACES[place], file.read_text())) == {expected}, file
