"""What the command lines of `ddlrun bench` and `ddlrun plan` share: argparse that raises our errors, and values."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from ddl.launch.counts import quoted, whole
from ddl.launch.errors import UsageError


class Parser(argparse.ArgumentParser):
    """Raises UsageError where argparse would end the program; `prog` is `ddlrun` and the command."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        command = self.prog.removeprefix("ddlrun ")
        raise UsageError(f"{command}: {message}; `{self.prog} --help` explains each option")


def read(parse: Callable[[str], object]) -> Callable[[str], object]:
    """`parse`, whose ValueError becomes argparse's message with the name of the option before it."""

    def convert(text: str) -> object:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def count(text: str) -> int:
    """A whole number, 1 or more. Raises ValueError."""
    try:
        return whole(text)
    except ValueError as error:
        raise ValueError(f"{quoted(text)}: {error}") from None


def output_file(text: str) -> Path:
    """A file that can be written, whether it is there yet or not. Raises ValueError, before anything is computed."""
    path = Path(text)
    try:
        if path.is_dir():
            raise ValueError(f"{quoted(text)} is a folder; expected a file")
        if not path.parent.is_dir():
            raise ValueError(f"{quoted(text)}: there is no folder {path.parent}; make it first, or name another file")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ValueError(f"{quoted(text)} cannot be written by this user; name another file")
    except OSError as error:  # Python 3.11 raises it for a name that is too long
        raise ValueError(f"{quoted(text)}: {error.strerror}; name another file") from None
    return path
