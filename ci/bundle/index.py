"""repodata.json: what a solver reads of a channel."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from bundle.errors import ToolError

# In a process of its own: the indexer of py-rattler 0.28 once aborted while its interpreter ended.
_PROGRAM = """
import asyncio, os, sys
from rattler.index import index_fs
asyncio.run(index_fs(sys.argv[1], write_zst=True, write_shards=False, force=True))
sys.stdout.flush()
os._exit(0)
"""


def index(channel: Path) -> None:
    """Write the index of `channel`, a folder of folders (linux-64, noarch). Raises ToolError.

    Every package is read anew: one of the same name may have another content.
    """
    (channel / "noarch").mkdir(parents=True, exist_ok=True)  # a channel without one is none to conda
    command = [sys.executable, "-c", _PROGRAM, str(channel)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    shutil.rmtree(channel / ".tmp", ignore_errors=True)  # where the indexer writes what it then renames
    if done.returncode:
        raise ToolError(f"{channel} could not be indexed: {done.stderr.strip()[-1000:]}")


def indexed(channel: Path) -> dict[str, str]:
    """The packages that the index of `channel` names, by their places, with their checksums; none where it has none."""
    found: dict[str, str] = {}
    for path in channel.glob("*/repodata.json"):
        try:
            records = json.loads(path.read_text())["packages.conda"]
            found |= {f"{path.parent.name}/{name}": record["sha256"] for name, record in records.items()}
        except (ValueError, KeyError, TypeError):  # of a run that was interrupted, or no index: it is written anew
            continue
    return found
