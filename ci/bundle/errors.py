"""What can go wrong, in words for the person at the command line."""

from __future__ import annotations

import shutil
from pathlib import Path

import yaml


def words(error: OSError) -> str:
    """What the system says of it, and of which file."""
    if isinstance(error, shutil.Error) and error.args and isinstance(error.args[0], list):
        # A tree that could not be copied: an entry (source, target, words) for each file. The first says enough.
        _, target, said = error.args[0][0]
        return f"{target}: {said}"
    return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)


class BundleError(Exception):
    """The base of all errors here. The message says what was asked, what was found, what to do."""


class RecipeError(BundleError):
    """A recipe, a variant file or an environment file that is not understood, at a line of a file."""

    def __init__(self, path: Path, line: int, message: str) -> None:
        super().__init__(f"{path}:{line}: {message}")
        self.path, self.line, self.message = path, line, message

    @classmethod
    def of_yaml(cls, path: Path, error: yaml.MarkedYAMLError) -> RecipeError:
        """What the reader of YAML says, at its line."""
        mark = error.problem_mark or error.context_mark
        return cls(path, mark.line + 1 if mark else 0, f"no YAML: {error.problem}")

    def __reduce__(self) -> tuple[type[RecipeError], tuple[Path, int, str]]:
        """From the process that builds to the one that reports."""
        return type(self), (self.path, self.line, self.message)


class BuildError(BundleError):
    """A package that could not be built or whose tests failed."""


class SolveError(BundleError):
    """No set of packages fits what was asked. The message holds the solver's explanation."""


class InstallError(BundleError):
    """Packages that could not be installed: what was there before is unchanged, or the message says what is not."""


class ToolError(BundleError):
    """Something of this machine that is needed is not there, or failed."""
