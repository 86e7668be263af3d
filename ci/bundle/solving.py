"""What an environment file asks for, solved from our channel and the one below it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rattler import RepoDataRecord

from bundle import index, install, stand_in
from bundle.base import CONDA_FORGE, Base
from bundle.environment_file import Environment
from bundle.errors import SolveError
from bundle.folders import Folders, path_of

OURS = "./out/channel"  # how an environment file names our channel


def channels_of(asked: Environment, where: Folders, base: Base) -> list[str]:
    """The addresses behind the channels of an environment file: ours, and what stands for conda-forge."""
    found: list[str] = []
    for channel in asked.channels:
        if channel == "nodefaults":
            continue  # a word of conda's: there are no others than these here
        if channel.rstrip("/") == OURS:
            found.append(where.channel.as_uri())
        elif channel == CONDA_FORGE:
            found += base.channels
        else:
            found.append(channel)
    return found


def solve(asked: Environment, specs: Sequence[str], where: Folders, base: Base) -> list[RepoDataRecord]:
    """The packages that satisfy `specs`, from the channels of `asked`.

    Raises SolveError with the solver's explanation, and how a framework comes into the stand-in that it was missed in.
    """
    try:
        return install.solve(specs, channels_of(asked, where, base))
    except SolveError as error:
        if missed := [name for name in _not_held(base) if re.search(rf"(?<![\w/-]){name}(?![\w/-])", str(error))]:
            raise SolveError(
                f"{error}\nThe stand-in for conda-forge has only the frameworks that it was made with, and not "
                f'{", ".join(missed)}: `make channel FRAMEWORKS="{" ".join(stand_in.CONDA_NAMES)}"` makes one with all'
            ) from None
        raise


def _not_held(base: Base) -> list[str]:
    """The frameworks that a stand-in may hold, and that this one does not."""
    if not base.is_stand_in:
        return []
    folders = filter(None, map(path_of, base.channels))
    held = {place.rpartition("/")[2].rsplit("-", 2)[0] for folder in folders for place in index.indexed(folder)}
    return [name for name in stand_in.CONDA_NAMES.values() if name not in held]
