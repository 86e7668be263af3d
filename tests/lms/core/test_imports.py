"""What the core may know: data and rules. No framework, no clock, no file system."""

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

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


def _spec(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError:  # a name inside a module
        return None
