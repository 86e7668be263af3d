"""What a test of the bundle's names in the tree is copied with its recipe, of which it is a part."""

from pathlib import Path

import pytest
from small_channel import PLATFORM

from bundle import rendered
from bundle.base import Base
from bundle.errors import RecipeError
from bundle.folders import Folders

META = """\
package:
  name: small-bundle
  version: 0.1.0
build:
  number: 0
outputs:
  - name: small
    build:
      noarch: generic
    test:
      files:
        - a/b.py
      commands:
        - python a/b.py
"""
BASE = Base("conda-forge", ("conda-forge",), "a test")


@pytest.fixture
def where(tmp_path: Path) -> Folders:
    (tmp_path / "LICENSE").touch()
    (tmp_path / "conda_build_config.yaml").write_text('python:\n  - "3.11"\n')
    (tmp_path / "meta.yaml").write_text(META)
    return Folders(tmp_path, tmp_path / "out")


def test_its_file_is_copied_and_changes_the_package(where: Folders) -> None:
    (where.tree / "a").mkdir()
    found = []
    for text in ("1", "2"):
        (where.tree / "a/b.py").write_text(text)
        (one,) = rendered.render(where, BASE, PLATFORM)
        assert (one.recipe.folder / "a/b.py").read_text() == text
        found.append(one.package.content)
    assert found[0] != found[1]


def test_one_that_is_not_there_is_named(where: Folders) -> None:
    with pytest.raises(RecipeError, match=r"meta\.yaml:1: test/files: there is no .*/a/b\.py"):
        rendered.render(where, BASE, PLATFORM)
