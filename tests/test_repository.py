import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
NOT_SOURCES = {
    ".git",
    ".venv",
    "out",
    "build",
    "__pycache__",
    ".pytest_cache",
    ".mypy_cache",
    ".ruff_cache",
    ".hypothesis",
    "dist",
}

# In pieces, so that this file does not find itself.
REGISTRIES = [
    name + "." + end
    for name, end in (
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("download.pytorch", "org"),
        ("deb.debian", "org"),
        ("archive.ubuntu", "com"),
        ("registry.npmjs", "org"),
        ("conda.anaconda", "org"),
        ("repo.anaconda", "com"),
    )
]
# /opt/conda is where the images have their environment.
MACHINE_PATHS = re.compile(r"(?<![\w.~/-])/(?:" + "|".join(("work", r"opt(?!/conda\b)", "root", "Users")) + r")/\w")

OF_A_GPU_BUILD = ("nvidia-", "cuda-", "triton")  # torch itself asks for exact versions of these


@cache
def sources() -> dict[Path, str]:
    """Every text file of the repository, by its path from the root."""

    def texts() -> Iterator[tuple[Path, str]]:
        for folder, folders, names in os.walk(ROOT):
            folders[:] = sorted(set(folders) - NOT_SOURCES)
            for name in names:
                path = Path(folder, name)
                if name not in NOT_SOURCES and path.is_file() and not path.is_symlink():  # a worktree's .git is a file
                    try:
                        yield path.relative_to(ROOT), path.read_text()
                    except UnicodeDecodeError:
                        continue  # a picture

    return dict(texts())


def requirements(name: str) -> list[Requirement]:
    lines = (re.sub(r"#.*", "", line).strip() for line in (ROOT / name).read_text().splitlines())
    return [Requirement(line) for line in lines if line]


def constraints() -> dict[str, str]:
    return {canonicalize_name(one.name): str(one.specifier) for one in requirements("ci/constraints.txt")}


def test_the_sources_are_found() -> None:
    assert {Path("README.md"), Path("lms/pyproject.toml"), Path(".ci/run"), Path("tests/test_repository.py")} <= set(
        sources()
    )


@pytest.mark.parametrize("host", REGISTRIES)
def test_no_file_names_the_host_of_a_registry(host: str) -> None:
    assert [str(path) for path, text in sources().items() if host in text] == []


def test_no_file_names_a_path_of_one_machine() -> None:
    found = {str(path): match[0] for path, text in sources().items() if (match := MACHINE_PATHS.search(text))}
    assert found == {}


def test_the_pre_commit_hooks_are_local() -> None:
    repos = re.findall(r"^ *- repo: *(.*)$", (ROOT / ".pre-commit-config.yaml").read_text(), re.MULTILINE)
    assert set(repos) == {"local"}


def test_the_package_carries_the_licence_of_the_repository() -> None:
    assert sources()[Path("lms/LICENSE")] == sources()[Path("LICENSE")]
    assert "Apache License" in sources()[Path("LICENSE")]


def test_no_folder_of_tests_is_a_package_that_would_shadow_another() -> None:
    assert [str(path) for path in sources() if path.parts[0] == "tests" and path.name == "__init__.py"] == []


def dependencies() -> list[str]:
    projects = [
        tomllib.loads((ROOT / name / "pyproject.toml").read_text())["project"]
        for name in ("lms", "frontends/glm", "frontends/caffe")
    ]
    lines = [line for one in projects for extra in one["optional-dependencies"].values() for line in extra]
    lines += [line for one in projects for line in one["dependencies"]]
    return [line for line in lines if not line.startswith("bascule-")]  # which is made of this tree


def test_every_pin_is_one_exact_version() -> None:
    assert {name: pin for name, pin in constraints().items() if not re.fullmatch(r"==[\d.]+(b\d+)?", pin)} == {}


def test_everything_that_set_up_installs_is_pinned() -> None:
    todo = [
        *requirements("ci/requirements.txt"),
        *requirements("ci/requirements_bundle.txt"),
        *map(Requirement, dependencies()),
    ]
    needed: set[tuple[str, str]] = set()  # names, each with each of its extras
    while todo:
        one = todo.pop()
        name = canonicalize_name(one.name)
        for extra in {"", *one.extras}:
            if (name, extra) not in needed and not name.startswith(OF_A_GPU_BUILD):
                needed.add((name, extra))
                lines = map(Requirement, importlib.metadata.requires(name) or [])
                todo += [line for line in lines if not line.marker or line.marker.evaluate({"extra": extra})]
    assert len(needed) > 20
    assert sorted({name for name, _ in needed} - set(constraints())) == []


def test_what_is_installed_is_what_is_pinned() -> None:
    pins = constraints()
    found = {canonicalize_name(package.name): package.version for package in importlib.metadata.distributions()}
    differing = {
        name: found[name] for name in set(pins) & set(found) if f"=={found[name].partition('+')[0]}" != pins[name]
    }
    assert differing == {}


def test_every_reason_for_a_dependency_is_given() -> None:
    lines = (ROOT / "ci/requirements.txt").read_text().splitlines()
    assert [line for line in lines if not re.match(r"#|[\w.-]+(\[[\w,-]+\])? +# \w", line)] == []


def test_the_wheel_holds_the_package_its_licence_and_its_command_and_needs_no_framework(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT / "lms", check=True, capture_output=True, timeout=110)
    (wheel,) = tmp_path.glob("bascule_lms-*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name).decode() for name in archive.namelist()}
    (metadata,) = (text for name, text in files.items() if name.endswith(".dist-info/METADATA"))
    assert {"lms/__init__.py", "lms/py.typed", "lms/cli.py"} <= set(files)
    assert any(name.endswith("licenses/LICENSE") for name in files)
    assert "lms = lms.cli:main" in "".join(text for name, text in files.items() if name.endswith("entry_points.txt"))
    needs = re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE)
    assert [line.partition(">")[0] for line in needs if "extra ==" not in line] == ["numpy"]
    assert any(line.startswith("torch") for line in needs)
