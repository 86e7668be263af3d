"""What the command lines of `ddlrun bench` and `ddlrun plan` share: argparse that raises our errors, and values."""

from __future__ import annotations

import argparse
from collections.abc import Callable
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
