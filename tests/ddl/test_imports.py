"""Which rooms of the package import which: arrows go one way, and what front ends share imports no framework."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "ddl/src/ddl"
# Each room, and those that it may import; "" is the package's own modules, on which all others stand.
ARROWS = {
    "": set(),
    "launch": {""},
    "planning": {"", "launch"},
    "bench": {"", "launch", "planning"},
    "frontends.core": {""},
    "torch": {"", "launch"},  # a rank looks at its interfaces as ddlrun does
    "tensorflow": {"", "frontends.core"},
    "keras": {"tensorflow"},
    "horovod": {"", "frontends.core", "torch", "tensorflow"},
    "ddlrun": {"", "launch", "planning", "bench"},  # the command, above all that it hands its words to
}


def room_of(name: str) -> str:
    """The room of a module, named without the `ddl.` before it."""
    return next((room for room in ARROWS if room and (name == room or name.startswith(f"{room}."))), "")


def imported(path: Path) -> Iterator[str]:
    """The modules of the package that a file imports, anywhere in it, without the `ddl.` before them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{one.name}" for one in node.names]
        else:
            continue
        yield from (name.removeprefix("ddl.") for name in names if name.startswith("ddl."))


FILES = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}


@pytest.mark.parametrize("room", ARROWS)
def test_a_room_imports_only_those_below_it(room: str) -> None:
    files = [name for name in FILES if room_of(name) == room]
    assert files
    wrong = [
        f"ddl.{name} imports ddl.{other}"
        for name in files
        for other in imported(FILES[name])
        if room_of(other) not in {room, *ARROWS[room]}
    ]
    assert not wrong


def test_what_front_ends_share_imports_no_framework() -> None:
    names = [f"ddl.{name}" for name in FILES if room_of(name) == "frontends.core"]
    look = f"import importlib, sys; [importlib.import_module(one) for one in {names}]; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", look],
        env={"PYTHONPATH": str(PACKAGE.parent)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert not {"torch", "tensorflow", "jax"} & set(done.stdout.split())
