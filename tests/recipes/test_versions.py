"""`make versions`: one version for all that is released together, one place for those that it is tested with."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = (
    "VERSION", "README.md", "*.yaml", "*.toml", "*/pyproject.toml", "recipes/*/pyproject.toml", "recipes/*/recipe.yaml",
    "recipes/libddl/CMakeLists.txt", "ddl/CMakeLists.txt", "ddl/src/ddl/__init__.py", "envs/*.yaml",
    "envs/chart/*.yaml", "docs/status.md", "docs/conda.md", "ci/setup", "ci/versions", "ci/*.txt",
    "lms/src/lms/tensorflow/decorator.py", "ddl/src/ddl/tensorflow/__init__.py",
)  # fmt: skip


def versions(tree: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, tree / "ci/versions", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_each_place_names_the_version_that_its_source_says() -> None:
    done = versions(ROOT, "--check")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("source", "old", "new", "place", "expected"),
    [
        ("VERSION", "0.1.0", "7.8.9", "recipes/libddl/recipe.yaml", 'version: "7.8.9"'),
        ("VERSION", "0.1.0", "7.8.9", "envs/all.yaml", "- bascule ==7.8.9"),
        ("conda_build_config.yaml", '  - "3.13"', '  - "3.13"\n  - "3.14"', "lms/pyproject.toml", "Python :: 3.14"),
        ("conda_build_config.yaml", '  - "3.13"', '  - "3.13"\n  - "3.14"', "meta.yaml", ">=3.11,<3.15"),
        ("conda_build_config.yaml", '"2.13"', '"2.14"', "ci/constraints.txt", "\ntorch==2.14.0\n"),
        ("conda_build_config.yaml", '"2.21"', '"2.22"', "meta.yaml", "tensorflow >=2.16,<2.23 "),
    ],
)
def test_a_change_of_a_source_is_written_everywhere(
    tmp_path: Path, source: str, old: str, new: str, place: str, expected: str
) -> None:
    for file in (file for pattern in FILES for file in ROOT.glob(pattern)):
        copy = tmp_path / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    path = tmp_path / source
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    assert versions(tmp_path, "--check").returncode == 1
    assert versions(tmp_path).returncode == 0
    assert expected in (tmp_path / place).read_text()
    assert versions(tmp_path, "--check").returncode == 0
