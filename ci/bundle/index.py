"""repodata.json: what a solver reads of a channel."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from bundle.errors import ToolError

# In a process of its own: the indexer of py-rattler 0.28 once aborted while its interpreter ended.
_PROGRAM = """
import asyncio, os, sys
from rattler.index import index_fs
asyncio.run(index_fs(sys.argv[1], write_zst=True, write_shards=False, force=sys.argv[2] == "force"))
sys.stdout.flush()
os._exit(0)
"""


def index(channel: Path, *, force: bool = False) -> None:
    """Write the index of `channel`, a folder of folders (linux-64, noarch). Raises ToolError.

    With `force` every package is read anew; else those that are in the index already are believed.
    """
    (channel / "noarch").mkdir(parents=True, exist_ok=True)  # a channel without one is none to conda
    command = [sys.executable, "-c", _PROGRAM, str(channel), "force" if force else ""]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    shutil.rmtree(channel / ".tmp", ignore_errors=True)  # where the indexer writes what it then renames
    if done.returncode:
        raise ToolError(f"{channel} could not be indexed: {done.stderr.strip()[-1000:]}")
