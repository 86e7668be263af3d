"""The channel below ours: conda-forge, or what is named in its place."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rattler import Channel, Gateway

from bundle import channel, stand_in
from bundle.errors import BundleError
from bundle.folders import Folders, path_of, write
from bundle.process import say

CONDA_FORGE = "conda-forge"
STAND_IN = "stand-in"
_PATIENCE = 8  # seconds that conda-forge gets to answer


@dataclass(frozen=True)
class Base:
    """A channel with everything that we do not build ourselves."""

    name: str
    address: str
    variants: Mapping[str, list[str]] = field(default_factory=dict)  # of conda_build_config.yaml, if it has not all
    checksums: Mapping[str, str] = field(default_factory=dict)  # of its packages, by name; empty: not looked at
    left_out: frozenset[str] = frozenset()  # frameworks that nobody asked for: what needs one is not tested

    @property
    def is_stand_in(self) -> bool:
        """Whether its packages are good for this machine only, wherever they lie."""
        folder = path_of(self.address)
        return folder is not None and (folder / stand_in.MARK).is_file()


def choose(asked: str | None, where: Folders, frameworks: Sequence[str]) -> Base:
    """The base that is `asked` for: conda-forge (None: it must answer), stand-in, a channel's address or folder.

    Says which it is. The stand-in is made here, with `frameworks`. Raises BundleError if there is none.
    """
    left_out = frozenset(stand_in.FRAMEWORKS) - frozenset(frameworks)
    if asked == STAND_IN:
        say("the packages are built against a stand-in for conda-forge: they are good on this machine only")
        return of_stand_in(stand_in.make(where, frameworks), left_out)
    if asked is None:
        asked = CONDA_FORGE
        if trouble := unreachable(CONDA_FORGE):
            raise BundleError(
                f"conda-forge does not answer: {trouble}\nBASE=ADDRESS names another channel that has its packages; "
                "BASE=stand-in makes one of pip's wheels and this Python, good on this machine only"
            )
    say(f"the packages are built against {asked}")
    return Base(asked, _address(asked), left_out=left_out)


def of_stand_in(made: Path, left_out: frozenset[str] = frozenset()) -> Base:
    """The stand-in at `made`, whose content is known: it has one Python."""
    found = {one["name"]: one["sha256"] for one in channel.records(made)}
    python = [stand_in.PYTHON]
    return Base(STAND_IN, made.as_uri(), {"python": python, "python_min": python}, found, left_out)


def remember(base: Base, where: Folders) -> None:
    """So that environments and mirrors are made from what the channel was built against."""
    write(where.work / "base.json", json.dumps([base.name, base.address]))


def remembered(where: Folders, asked: str | None = None) -> Base:
    """What the channel was built against, or another channel that is asked for in its place.

    Raises BundleError: there is no channel.
    """
    try:
        built = Base(*json.loads((where.work / "base.json").read_text()))
    except (OSError, ValueError, TypeError):
        raise BundleError(f"{where.channel} is no finished channel yet: run `make channel` first") from None
    if asked in (None, built.name):
        return built
    say(f"the packages were built against {built.name}, and get what they need from {asked}")
    return Base(str(asked), _address(str(asked)))


def _address(asked: str) -> str:
    return Path(asked).resolve().as_uri() if Path(asked).is_dir() else asked


def unreachable(name: str) -> str | None:
    """Why the channel cannot be used; None if it answers."""

    async def ask() -> None:
        gateway = Gateway(show_progress=False)
        await gateway.query([Channel(name)], ["noarch"], ["python_abi"], recursive=False)

    try:
        asyncio.run(asyncio.wait_for(ask(), _PATIENCE))
    except Exception as error:  # whatever way there is to fail: DNS, proxies, certificates, a page in place of an index
        words = str(error).strip().splitlines()
        return f"{type(error).__name__}: {words[-1].strip() if words else f'no answer in {_PATIENCE} s'}"
    return None
