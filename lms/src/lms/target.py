"""The program that `lms run` and `lms plan` run: found and executed as python does it."""

from __future__ import annotations

import ast
import builtins
import os
import re
import runpy
import shlex
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from itertools import dropwhile
from pathlib import Path
from types import ModuleType, TracebackType

from lms.errors import LMSError, UsageError, remedy


@dataclass(frozen=True)
class Target:
    """The program to run: a script (or a folder or archive with __main__.py) or a module's name, and its arguments."""

    name: str
    args: tuple[str, ...] = ()
    is_module: bool = False

    @property
    def title(self) -> str:
        """The script's name without its folder, or the module's."""
        return self.name if self.is_module else Path(os.path.abspath(self.name)).name

    @property
    def words(self) -> list[str]:
        """The program and its arguments, as on the command line of `lms run`."""
        return [*(["-m"] if self.is_module else []), self.name, *self.args]


def parse_target(words: Sequence[str], command: str) -> Target:
    """The script, or -m and a module, with its arguments. Raises UsageError if it is not there."""
    name, *rest = words or [""]
    is_module = name.startswith("-m")
    if is_module:
        name, *rest = [name[2:], *rest] if name != "-m" else rest or [""]
        if not name:
            raise UsageError("-m: expected the name of a module, as in `lms run -m package.train`")
    elif not name:
        raise UsageError("SCRIPT: none given; expected the path of a Python script, or -m MODULE")
    else:
        path = Path(name)
        if _PYTHON.fullmatch(path.name) and not _is_script(path):
            raise UsageError(_without_python(name, rest, command))
        wrong = "no such file" if not os.path.exists(path) else ""  # False also for a name that is too long
        if os.path.isdir(path) and not (path / "__main__.py").is_file():
            wrong = "a folder without __main__.py"
        if wrong:
            raise UsageError(f"SCRIPT={name!r}: {wrong}; expected the path of a Python script, or -m MODULE")
    return Target(name, tuple(rest), is_module=is_module)


_PYTHON = re.compile(r"python[0-9.]*")


def _is_script(path: Path) -> bool:
    """Whether it is a file, and no executable of the system."""
    try:
        with path.open("rb") as file:
            return file.read(4) != b"\x7fELF"
    except OSError:
        return False


def _without_python(name: str, rest: list[str], command: str) -> str:
    target = list(dropwhile(lambda word: word.startswith("-") and word != "-m", rest)) or ["train.py"]
    return (
        f"SCRIPT={name!r}: leave the interpreter out, as in `lms {command} {shlex.join(target)}`: "
        f"the script runs in the Python of lms, {sys.executable}"
    )


def framework_of(target: Target) -> str:
    """The framework that the target trains with: "tensorflow" if it imports Keras or TensorFlow and no PyTorch.

    What it imports by other modules is not looked for. So if it imports neither: the one that is installed, or "torch".
    """
    found = _imported(target)
    if "torch" in found:
        return "torch"
    if found & {"tensorflow", "keras", "keras_hub"} or (find_spec("torch") is None and find_spec("tensorflow")):
        return "tensorflow"
    return "torch"


def _imported(target: Target) -> set[str]:
    """First names of the modules that the target's own file imports; none if it cannot be read."""
    path = Path(target.name.replace(".", "/") + ".py" if target.is_module else target.name)
    if target.is_module and not path.is_file():
        path = path.with_suffix("") / "__main__.py"
    elif path.is_dir():
        path /= "__main__.py"
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return set()
    names = [one.name for node in ast.walk(tree) if isinstance(node, ast.Import) for one in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and not node.level]
    return {name.partition(".")[0] for name in names}


OVER_LIMIT = 6  # exit status of a script that succeeded while memory went over the limit


class Enough(BaseException):
    """Ends a script that has run for long enough. No Exception: a script's `except Exception` lets it pass."""


def execute(target: Target) -> int:
    """Run the target as python does; 1 when it ended with an exception, which has been shown, else 0.

    Raises LMSError, KeyboardInterrupt and SystemExit with a status other than 0 as the target does.
    """
    sys.argv[:] = [target.name, *target.args]
    if not sys.flags.safe_path:
        # Our own entry (a console script's folder, or the working directory of `-m lms`) makes way for the target's.
        del sys.path[0]
    try:
        if target.is_module:
            _execute_module(target.name)
        elif os.path.isfile(target.name) and not target.name.endswith(".pyc") and not zipfile.is_zipfile(target.name):
            _execute_file(target.name)
        else:
            runpy.run_path(os.path.abspath(target.name), run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    except LMSError:
        raise
    except Exception as error:
        error.__traceback__ = _own(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def _execute_file(name: str) -> None:
    # Not by runpy.run_path: it gives sys.argv[0] and __file__ one spelling, but python makes only the latter
    # absolute, and it takes the script's module away before exit handlers run.
    path = os.path.abspath(name)
    if not sys.flags.safe_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    loader = SourceFileLoader("__main__", path)
    try:
        source = loader.get_data(path)
    except OSError as error:
        advice = remedy(error, "expected a Python script that this user may read")
        raise UsageError(f"SCRIPT={name!r}: {error.strerror}; {advice}") from None
    code = loader.source_to_code(source, path)
    module = ModuleType("__main__")
    module.__dict__.update(__file__=path, __loader__=loader, __builtins__=builtins, __cached__=None)
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def _execute_module(name: str) -> None:
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())
    if not _found(name):
        raise UsageError(f"-m {name}: no module of that name; expected one that `python -m` could run")
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _found(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


_OURS = (
    __file__,
    runpy.__file__,
    "<frozen runpy>",
    "<frozen importlib._bootstrap>",
    "<frozen importlib._bootstrap_external>",
)


def _own(traceback: TracebackType | None) -> TracebackType | None:
    """The script's own part of a traceback: what python would show if it had been run without us."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename in _OURS:
        traceback = traceback.tb_next
    return traceback
