"""How long the bundle takes, from nothing: one JSON with the machine, and each figure beside what it must reach.

A figure is the wall time of a command, from its start to its end, once. Wheels that pip has to fetch are fetched in
"channel, from nothing"; how long that takes is said apart, because it is the network's.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from bundle import smoke
from bundle.errors import ToolError
from bundle.folders import Folders
from bundle.progress import say

_REDUCE = """
import ddl, numpy
ddl.init()
values = numpy.full(1_000_003, ddl.rank() + 1.0)
ddl.allreduce(values)
assert (values == 3).all()
"""


# Without any network but the loopback, through which MPI's daemons talk to their own host.
OFFLINE = ("unshare", "--net", "--", "sh", "-c", 'PATH=$PATH:/usr/sbin:/sbin ip link set lo up && exec "$@"', "offline")


@dataclass(frozen=True)
class Figure:
    """One command: its wall time, and how long it may take where that was promised."""

    name: str
    seconds: float
    limit: float | None = None

    def __str__(self) -> str:
        promised = f", at most {self.limit:g} promised" if self.limit else ""
        return f"{self.name}: {self.seconds:.1f} s{promised}"


def run(where: Folders, asked: Sequence[str]) -> Path:
    """Measure in `where.out`, which is emptied; `asked` are further options of `bundle channel`. The JSON's path.

    Raises ToolError with the output of a command that fails.
    """
    if where.out == where.tree / "out":
        raise ToolError("bench empties its folder: name one of its own, `--out out/bench-bundle`")
    shutil.rmtree(where.out, ignore_errors=True)
    bundle = [sys.executable, "-m", "bundle", "--out", str(where.out)]
    prefix = where.out / "envs" / "pytorch"
    figures = [
        _timed("channel, from nothing", [*bundle, "channel", *asked], where, limit=300),
        _timed("channel, nothing changed", [*bundle, "channel", *asked], where, limit=15),
        _timed("bascule-pytorch and the example's needs into a new prefix",
               [*bundle, "env", "pytorch", "--prefix", str(prefix), "--no-smoke"], where, limit=30),
    ]  # fmt: skip
    inside = smoke.environment(prefix)
    offline = list(OFFLINE) if os.geteuid() == 0 else []
    say("the rest runs without a network" if offline else "the rest runs with a network: only root can leave it")
    data = where.out / "brain"
    train = ["lms", "run", "--budget", "20MB", "examples/brain_mri/train.py", "--resolution", "4", "--steps", "2"]
    figures += [
        _timed("two steps of examples/brain_mri under lms run", [*offline, *train, "--data", str(data)], where, inside),
        _timed("an allreduce of two ranks under ddlrun",
               [*offline, "ddlrun", "-np", "2", "python", "-c", _REDUCE], where, inside),
        _timed("mirror of pytorch", [*bundle, "mirror", "pytorch"], where),
        _timed("verify_mirror", [str(where.out / "mirror" / "verify_mirror")], where),
    ]  # fmt: skip
    made = where.out / "bundle.json"
    sizes = {
        name: sum(path.stat().st_size for path in (where.out / name).rglob("*") if path.is_file())
        for name in ("channel", "stand-in/channel", "envs/pytorch", "mirror")
    }
    document = {
        "machine": {"cores": os.cpu_count(), "system": platform.platform(), "processor": _processor()},
        "versions": {name: metadata.version(name) for name in ("py-rattler", "py-rattler-build", "torch")},
        "python": platform.python_version(),
        "load_before": os.getloadavg(),
        "figures": [asdict(figure) for figure in figures],
        "bytes": sizes,
    }
    made.write_text(json.dumps(document, indent=1) + "\n")
    return made


def _timed(
    name: str,
    command: Sequence[str],
    where: Folders,
    variables: Mapping[str, str] = os.environ,
    *,
    limit: float | None = None,
) -> Figure:
    program = shutil.which(command[0], path=variables.get("PATH")) or command[0]
    begun = time.monotonic()
    done = subprocess.run(
        [program, *command[1:]],
        cwd=where.tree,
        env=dict(variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    figure = Figure(name, time.monotonic() - begun, limit)
    if done.returncode:
        raise ToolError(f"{name} fails with status {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    say(str(figure))
    return figure


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
