"""Which folder may import which, as docs/lms.md has it. The core has no framework, no clock and no file system."""

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

import lms.core

FORBIDDEN = {"torch", "tensorflow", "time", "datetime", "os", "io", "pathlib", "shutil", "mmap", "threading"}
FOLDER = Path(lms.core.__path__[0])


def imported(path: Path) -> Iterator[str]:
    """The full name of each module that a file imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{one.name}" for one in node.names))


def test_the_core_and_what_it_imports_of_lms_know_no_framework_no_clock_and_no_file_system() -> None:
    seen: set[Path] = set()
    left = sorted(FOLDER.glob("*.py"))
    assert len(left) > 5
    while left:
        path = left.pop()
        if path in seen:
            continue
        seen.add(path)
        for name in imported(path):
            assert name.partition(".")[0] not in FORBIDDEN, f"{path.name} imports {name}"
            if name.startswith("lms.") and (spec := _spec(name)) is not None and spec.origin:
                left.append(Path(spec.origin))


@pytest.mark.parametrize(
    ("folder", "allowed"),
    [
        ("core", set()),
        ("memory", {"core"}),
        ("runtime", {"core", "memory"}),
        ("metrics", set()),
        ("torch", {"core", "memory", "runtime", "metrics"}),
        ("integrations", {"torch"}),
        ("tensorflow", {"core", "memory"}),
        ("link", {"core", "memory", "torch.cuda"}),
    ],
)
def test_a_folder_imports_those_below_it_alone(folder: str, allowed: set[str]) -> None:
    package = FOLDER.parent
    folders = {path.parent.name for path in package.glob("*/__init__.py")}
    files = [path for path in (package / folder).rglob("*.py") if path.name != "launcher.py"]
    assert files
    for path in files:
        for name in imported(path):
            _, _, below = name.partition("lms.")
            if name.startswith("lms.") and below.partition(".")[0] in folders - {folder}:
                assert any(f"{below}.".startswith(f"{one}.") for one in allowed), f"{path.name} imports {name}"


def _spec(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError:  # a name inside a module
        return None
