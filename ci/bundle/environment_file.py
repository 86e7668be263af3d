"""envs/*.yaml: what `conda env create -f` reads, and nothing beyond it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from packaging.requirements import InvalidRequirement, Requirement
from rattler import RepoDataRecord

from bundle import channel, stand_in
from bundle.base import CONDA_FORGE, Base
from bundle.errors import BundleError
from bundle.folders import Folders

OURS = "./out/channel"  # how an environment file names our channel


@dataclass(frozen=True)
class Environment:
    """An environment that is asked for."""

    path: Path
    name: str
    channels: tuple[str, ...]
    specs: tuple[str, ...]  # of conda
    pip: tuple[str, ...]  # of the user's own pip step

    def of_conda(self, *, with_pip: bool) -> list[str]:
        """What is asked of conda; without pip itself if only the pip step needs it, which is left out."""
        return [spec for spec in self.specs if with_pip or not (spec == "pip" and self.pip)]

    def frameworks(self) -> list[str]:
        """Those of the stand-in's that it needs, by what it names."""
        names = {spec.split()[0] for spec in self.specs}
        return [
            one
            for one in stand_in.FRAMEWORKS
            if names & {"bascule", one} or any(name.endswith(f"-{one}") for name in names)
        ]


def read(path: Path) -> Environment:
    """The environment that the file describes. Raises BundleError that names the file and what is not understood."""
    try:
        found = yaml.safe_load(path.read_text())
        name, channels, dependencies = (found.pop(key) for key in ("name", "channels", "dependencies"))
        pip = [line for one in dependencies if isinstance(one, dict) for line in one["pip"]]
        specs = [one for one in dependencies if not isinstance(one, dict)]
        for line in pip:  # nothing that pip would read elsewhere, so that it is known before what it brings
            Requirement(line)
        if found or not all(isinstance(one, str) for one in (name, *channels, *specs)):
            raise ValueError("expected name, channels and dependencies, which are text, and one pip: with requirements")
    except OSError as error:
        others = ", ".join(sorted(one.stem for one in path.parent.glob("*.yaml"))) or "none"
        raise BundleError(f"{path} cannot be read ({error.strerror}); there are {others}") from None
    except InvalidRequirement as error:
        raise BundleError(f"{path}: pip: {error}; leave pip's options to PIP_* in the environment") from None
    except (yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BundleError(f"{path}: {type(error).__name__}: {error}") from None
    return Environment(path, name, tuple(channels), tuple(specs), tuple(pip))


def solve(asked: Environment, specs: Sequence[str], where: Folders, base: Base) -> list[RepoDataRecord]:
    """The packages that satisfy `specs`, from the channels of `asked`: ours, and what stands for conda-forge.

    Raises BundleError with the solver's explanation, and how a framework comes into the stand-in that it was missed in.
    """
    known = {OURS: where.channel.as_uri(), CONDA_FORGE: base.address}
    channels = [known.get(one.rstrip("/"), one) for one in asked.channels if one != "nodefaults"]  # a word of conda's
    try:
        return channel.solve(specs, channels)
    except BundleError as error:
        if base.is_stand_in and asked.frameworks():
            raise BundleError(
                f"{error}\nThe stand-in for conda-forge has the frameworks that it was made with: "
                f'`make channel BASE=stand-in FRAMEWORKS="{" ".join(asked.frameworks())}"`'
            ) from None
        raise
