"""The one parser of ddlrun's command lines, and the arguments of this process as `ps` shows them."""

from __future__ import annotations

import argparse
import ctypes
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from ddl.launch.counts import quoted, whole
from ddl.launch.errors import UsageError

WIDTH = 118


class Help(argparse.RawDescriptionHelpFormatter):
    """Each option in one line: its first two names and its value."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=WIDTH)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = ", ".join(action.option_strings[:2])
        return f"{names} {action.metavar or ''}".strip() if names else super()._format_action_invocation(action)


class Parser(argparse.ArgumentParser):
    """argparse by ddlrun's conventions; `prog` is `ddlrun`, or `ddlrun COMMAND`.

    Every option may have one dash or two, and is never abbreviated. Its value may begin with a dash. A wrong command
    line raises UsageError.
    """

    def __init__(self, prog: str, **more: Any) -> None:
        super().__init__(prog, **{"formatter_class": Help, "allow_abbrev": False, "add_help": False, **more})

    def parse_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]  # as argparse's own
        """Parse options and other words, in any order."""
        found: list[str] = []
        words = list(args)
        while words:
            found += self._options(words)
            found += [words.pop(0)] if words else []
        return super().parse_args(found, namespace)

    def parse_start(
        self, words: Sequence[str], given: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """The options before the first other word, and all words from that one on; "--" ends the options, too.

        The options are added to those in `given`.
        """
        rest = list(words)
        return super().parse_args(self._options(rest), given), rest

    def _options(self, words: list[str]) -> list[str]:
        """Take the options from the start of `words`, each as one word `NAME=VALUE` for argparse."""
        listed = {name.lstrip("-"): (name, action) for name, action in self._option_string_actions.items()}
        found = []
        while words and words[0].startswith("-") and words[0] not in ("-", "--"):
            word = words.pop(0)
            spelled, equals, value = word.partition("=")
            if spelled.lstrip("-") not in listed:
                near = get_close_matches(spelled.lstrip("-"), listed, n=1)
                meant = f"did you mean {listed[near[0]][0]}? " if near else ""
                self.error(f"{spelled}: unknown option; {meant}`{self.prog} --help` lists them")
            name, action = listed[spelled.lstrip("-")]
            if action.nargs == 0:
                if equals:
                    self.error(f"{word}: {spelled} takes no value")
                found.append(name)
                continue
            if not equals:
                if not words:
                    self.error(f"{spelled}: expected a value after it: {spelled} {action.metavar or ''}".rstrip())
                value = words.pop(0)
            found.append(f"{name}={value}")
        return found

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        hint = "" if "--help" in message else f"; `{self.prog} --help` explains each option"
        raise UsageError(f"{self.prog}: {message}{hint}".removeprefix("ddlrun").lstrip(" :"))


def read(parse: Callable[[str], object]) -> Callable[[str], object]:
    """Wrap `parse`: its ValueError becomes argparse's error, which names the option."""

    def convert(text: str) -> object:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


def count(text: str, least: int = 1) -> int:
    """A whole number, `least` or more. Raises ValueError."""
    try:
        return whole(text, least=least)
    except ValueError as error:
        raise ValueError(f"{quoted(text)}: {error}") from None


def mask(secrets: Iterable[tuple[str, str]]) -> None:
    """Write asterisks over the values of secret variables (name, value) in the arguments of this process.

    Until then, a few hundredths of a second, every user of the host can read them.
    """
    with suppress(OSError, IndexError, ValueError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, which proc(5) counts as 48 and 49
        shown = Path("/proc/self/cmdline").read_bytes()
        if len(shown) != end - start or ctypes.string_at(start, len(shown)) != shown:
            return
        for name, value in secrets:
            hidden = os.fsencode(value)
            word = os.fsencode(f"{name}=") + hidden + b"\0"
            at = shown.find(word)
            while at >= 0:
                ctypes.memset(start + at + len(word) - 1 - len(hidden), ord("*"), len(hidden))
                at = shown.find(word, at + 1)
