"""A command of `lms`: its parser, and what it needs to be installed."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lms.errors import UsageError

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


class Parser(argparse.ArgumentParser):
    """A command's parser. It refuses what it does not know itself, so that the command's own usage is shown."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse does, but nothing is left over: an unknown word is an error."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unknown: {shlex.join(unknown)}; `{self.prog} --help` lists what there is")
        return found, unknown

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is sys.stdout:
            print(message, end="")  # argparse would ignore a full disk
        else:
            super()._print_message(message, file)


def command(
    commands: Commands, name: str, text: str, description: str, epilog: str = "", *, takes_script: bool = False
) -> argparse.ArgumentParser:
    """Add a command whose description and examples stand as they are written."""
    usage = f"lms {name} [OPTIONS] SCRIPT [ARGS...]\n       lms {name} [OPTIONS] -m MODULE [ARGS...]"
    return commands.add_parser(
        name,
        usage=usage if takes_script else None,
        help=text,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def check_installed(what: str, *modules: str, extra: str) -> None:
    """Raises UsageError, which says what to install, if one of the `modules` that `what` needs is missing."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        needed = " and ".join(missing)
        raise UsageError(
            f"{what} needs {needed}, which is not installed: pip install './lms[{extra}]' in a copy of the repository"
        )
