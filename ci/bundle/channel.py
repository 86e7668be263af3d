"""A channel: its index, what is in it, what can be installed from it."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import rattler
from rattler import Gateway, RepoDataRecord, Subdir, VirtualPackage, VirtualPackageOverrides

from bundle.errors import BundleError
from bundle.folders import seen, write

# In a process of its own: py-rattler's indexer now and then kills its process while the interpreter ends.
_INDEX = """
import asyncio, os, sys
from rattler.index import index_fs
asyncio.run(index_fs(sys.argv[1], write_zst=True, write_shards=False, force=True))
os._exit(0)
"""


def index(channel: Path) -> None:
    """Write the index of `channel`, a folder of folders (linux-64, noarch), if a file in it has changed since.

    It reads every package anew: one of the same name may have another content. Raises BundleError.
    """
    noted = channel.with_name(f".{channel.name}.indexed")
    if noted.is_file() and noted.read_text() == _state(channel):
        return
    (channel / "noarch").mkdir(parents=True, exist_ok=True)  # a channel without one is none to conda
    done = subprocess.run(
        [sys.executable, "-c", _INDEX, channel], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    shutil.rmtree(channel / ".tmp", ignore_errors=True)
    if done.returncode:
        raise BundleError(f"{channel} could not be indexed: {done.stderr.strip()[-1000:]}")
    write(noted, _state(channel))


def _state(channel: Path) -> str:
    """What the index depends on, and the index itself, as a text to compare."""
    files = [[path.parent.name, *seen(path)] for path in sorted(channel.glob("*/*"))]
    return json.dumps([version("py-rattler"), _INDEX, files])


def records(channel: Path) -> Iterator[dict[str, Any]]:
    """What the index of `channel` says of each package."""
    for path in channel.glob("*/repodata.json"):
        yield from json.loads(path.read_text())["packages.conda"].values()


def solve(specs: Sequence[str], channels: Sequence[str]) -> list[RepoDataRecord]:
    """The packages that satisfy `specs`, from `channels` in their order of preference.

    Raises BundleError with the solver's explanation.
    """

    async def run() -> list[RepoDataRecord]:
        return await rattler.solve(
            [rattler.Channel(channel) for channel in channels],
            list(specs),
            gateway=Gateway(show_progress=False),
            platforms=[Subdir.current(), Subdir("noarch")],
            virtual_packages=VirtualPackage.detect(VirtualPackageOverrides.from_env()),
        )

    try:
        return asyncio.run(run())
    except Exception as error:  # the solver's and the gateway's have no common base
        raise BundleError(
            f"no set of packages has {', '.join(specs)}\nfrom {', '.join(channels)}:\n{str(error).strip()}"
        ) from None
