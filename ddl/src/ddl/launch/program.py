"""Look: find the program, and the Python that runs it if it is a Python file."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ddl.launch import process
from ddl.launch.console import say
from ddl.launch.counts import quoted
from ddl.launch.errors import UsageError

PYTHON_SECONDS = 20  # for a python to say whether it has ddl; its first start may read from a cold disk


def find(words: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """The words with which mpirun starts the program, and why. Raises UsageError if there is no such program."""
    made, why = choose(words, sys.executable, shutil.which, os.path.isfile)
    path = shutil.which(made[0]) if made[0] in ("python", "python3") else None
    if path is not None and not os.path.samefile(Path(path).parent, Path(sys.executable).parent):
        # Without an activated environment, this is often the system's Python.
        if version := _version_of_ddl(path):
            return made, f"as given: {path}, which has ddl {version}"
        say(
            f"{made[0]} is taken to be {sys.executable}, which has ddl, and not {path}, which has none; a path is "
            "taken as given"
        )
        made = (sys.executable, *made[1:])
    return made, why


def _version_of_ddl(python: str) -> str:
    """The version of this python's ddl, if it has its library; "" if there is none, or no answer."""
    ask = [python, "-c", "from ddl import __version__, library; library.find(); print(__version__)"]
    status, output, _ = process.capture_plain(ask, os.environ, PYTHON_SECONDS)
    return output.strip() if status == 0 else ""


def choose(
    words: Sequence[str], python: str, which: Callable[[str], str | None], is_file: Callable[[str], bool]
) -> tuple[tuple[str, ...], str]:
    """As `find`, but pure: `which` finds an executable by its path, or on PATH, and `is_file` knows the files.

    This `python` runs a Python file that is not executable, and stands in for `python` if PATH has none. A program that
    is not on PATH may lie beside this `python`, as `lms` does in an environment that is not activated.
    """
    first, rest = words[0], tuple(words[1:])
    if not first:
        raise UsageError("PROGRAM is empty; expected a program to run, as in `ddlrun python train.py`")
    if first in ("python", "python3") and which(first) is None:
        return (python, *rest), f"there is no {first} on PATH: {python}"
    path = first if "/" in first else f"./{first}"
    if first.endswith(".py") and is_file(path) and which(path) is None:
        return (python, *words), f"{first} is a Python file and not executable: {python} runs it"
    if found := which(first):
        return tuple(words), f"as given: {found}"
    if "/" in first:
        if is_file(first):
            raise UsageError(f"PROGRAM {first!r}: it is not executable: chmod +x {first}, or name what runs it")
        where = f"(in {Path.cwd()}); give the path of a program or a Python file"
        raise UsageError(f"PROGRAM {quoted(first)}: no such file {where}")
    if first.endswith(".py") and is_file(path):
        return (python, *words), f"{first} is not on PATH: {python} runs it"
    if beside := which(os.path.join(os.path.dirname(python), first)):
        return (beside, *rest), f"{first} is not on PATH, but beside the python that runs ddlrun: {beside}"
    hint = f"there is a file of this name here: use {path}" if is_file(path) else "give its path, or a Python file's"
    raise UsageError(f"PROGRAM {quoted(first)}: not found on PATH; {hint}")
