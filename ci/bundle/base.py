"""The channel below ours: conda-forge where it is reached, else the stand-in."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rattler import Channel, Gateway, Subdir

from bundle import plan, stand_in
from bundle.errors import ToolError
from bundle.folders import Folders, path_of, write
from bundle.progress import say

AUTO = "auto"
CONDA_FORGE = "conda-forge"
STAND_IN = "stand-in"
_PATIENCE = 8  # seconds that conda-forge gets to answer: where a firewall drops all, every run waits that long


@dataclass(frozen=True)
class Base:
    """A channel with everything that we do not build ourselves."""

    name: str
    channels: tuple[str, ...]
    reason: str
    pythons: list[str] | None = None  # those that it has; None: all
    # By name: of its packages and of all that they run with. Empty: not looked at.
    checksums: Mapping[str, str] = field(default_factory=dict)
    left_out: frozenset[str] = frozenset()  # frameworks that nobody asked for: what needs one is not tested

    @property
    def is_stand_in(self) -> bool:
        """Whether its packages are good for this machine only, wherever they lie."""
        return any((folder / stand_in.MARK).is_file() for folder in filter(None, map(path_of, self.channels)))


def choose(asked: str, where: Folders, frameworks: Sequence[str], variants: Mapping[str, list[str]]) -> Base:
    """The base for `asked`: "auto", "conda-forge", "stand-in", or another channel's address or folder.

    Says which it is, and why. The stand-in is made here, with `frameworks`. Raises ToolError where it cannot be, and
    where it would take the place of another base that nobody asked to leave.
    """
    reason = "asked for"
    if asked == AUTO:
        asked, reason = CONDA_FORGE, "it answers"
        if trouble := unreachable(CONDA_FORGE):
            _keep(where, trouble)
            asked, reason = STAND_IN, f"conda-forge does not answer: {trouble}"
    named = "a stand-in for conda-forge" if asked == STAND_IN else asked
    say(f"the packages are built against {named} ({reason})")
    left_out = frozenset(stand_in.CONDA_NAMES[group] for group in set(stand_in.CONDA_NAMES) - set(frameworks))
    if asked != STAND_IN:
        return replace(_elsewhere(asked, reason), left_out=left_out)
    groups = [stand_in.BASE, *frameworks]
    names = [name for group in groups for name in stand_in.GROUPS[group]]
    channel = stand_in.make(where.stand_in, names, variants, where.tree / "ci/constraints.txt")
    return of_folder(STAND_IN, channel, str(Subdir.current()), reason, left_out)


def _keep(where: Folders, trouble: str) -> None:
    """Raises ToolError where the channel was built against more than a stand-in: it may be used on other machines."""
    try:
        built = remembered(where, None)
    except ToolError:
        return
    if built.is_stand_in or built.name == STAND_IN:
        return
    raise ToolError(
        f"{where.channel} was built against {built.name}, and conda-forge does not answer ({trouble}): run this again "
        f"when it does; BASE={built.name} names what it was built against, BASE={STAND_IN} makes the channel one that "
        "is good on this machine only"
    )


def remember(base: Base, where: Folders) -> None:
    """So that environments and mirrors are made from what the channel was built against."""
    write(where.work / "base.json", json.dumps({"name": base.name, "channels": base.channels}))


def remembered(where: Folders, asked: str | None) -> Base:
    """What the channel was built against, or another channel that is asked for in its place.

    Raises ToolError: there is no channel, or it was not built against the stand-in that is asked for.
    """
    try:
        noted = json.loads((where.work / "base.json").read_text())
        built = Base(noted["name"], tuple(noted["channels"]), "the channel was built against it")
    except (OSError, ValueError, KeyError, TypeError):
        raise ToolError(f"{where.channel} is no finished channel yet: run `make channel` first") from None
    if asked in (None, AUTO, built.name):
        return built
    if asked == STAND_IN:
        raise ToolError(f"{where.channel} was built against {built.name}: `make channel BASE={STAND_IN}` first")
    say(f"the packages were built against {built.name}, and get what they need from {asked}")
    return _elsewhere(asked, "asked for")


def _elsewhere(asked: str, reason: str) -> Base:
    address = Path(asked).resolve().as_uri() if Path(asked).is_dir() else asked
    return Base(asked, (address,), reason)


def of_folder(name: str, channel: Path, platform: str, reason: str, left_out: frozenset[str] = frozenset()) -> Base:
    """A base whose whole content is known."""
    records = json.loads((channel / platform / "repodata.json").read_text())["packages.conda"].values()
    sums: dict[str, list[str]] = {}
    runs_with: dict[str, set[str]] = {}
    for record in records:
        sums.setdefault(record["name"], []).append(record["sha256"])
        runs_with.setdefault(record["name"], set()).update(one.split()[0] for one in record["depends"])

    def reached(name: str) -> str:
        found = (one for reached in plan.closure([name], runs_with) for one in sums.get(reached, ()))
        return hashlib.sha256("".join(sorted(found)).encode()).hexdigest()

    return Base(
        name,
        (channel.as_uri(),),
        reason,
        pythons=sorted({".".join(one["version"].split(".")[:2]) for one in records if one["name"] == "python"}),
        checksums={name: reached(name) for name in sums},
        left_out=left_out,
    )


def unreachable(channel: str) -> str | None:
    """Why `channel` cannot be used; None where it answers."""

    async def ask() -> None:
        gateway = Gateway(show_progress=False)
        await gateway.query([Channel(channel)], ["noarch"], ["python_abi"], recursive=False)

    try:
        asyncio.run(asyncio.wait_for(ask(), _PATIENCE))
    except Exception as error:  # whatever way there is to fail: DNS, proxies, certificates, a page in place of an index
        words = str(error).strip().splitlines()
        return f"{type(error).__name__}: {words[-1].strip() if words else f'no answer in {_PATIENCE} s'}"
    return None
