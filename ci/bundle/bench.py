"""How long the bundle takes, from nothing: one JSON with the machine, and each figure beside what it must reach.

A figure is the wall time of a command, from its start to its end, once, with the processor's time of all that it
started, which neighbours on the machine change less. "Channel, from nothing" fetches its wheels; how long that took is
said apart, as each of its other parts is: the network's time is nobody's merit. "Nothing" is an empty folder in place
of out/: .venv is there, and so is what pip keeps of earlier downloads in the user's cache.
"""

from __future__ import annotations

import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

from bundle import smoke
from bundle.errors import ToolError
from bundle.folders import Folders, is_ours
from bundle.progress import say

REDUCE = """
import ddl, numpy
ddl.init()
values = numpy.full(1_000_003, ddl.rank() + 1.0)
ddl.allreduce(values)
assert (values == 3).all()
if ddl.rank() == 0:
    print(ddl.size(), "ranks: right")
"""


_MARK = ".bench"  # in a folder that a bench may empty
# What the commands say about a part that has ended: a package, or a stage.
_PART = re.compile(
    r"^bundle: (?:channel: (?!done))?(\S.*?(?:: built|: tested)?)(?:: done)? in ([\d.]+) s", re.MULTILINE
)

# Without any network but the loopback, through which MPI's daemons talk to their own host.
OFFLINE = ("unshare", "--net", "--", "sh", "-c", 'PATH=$PATH:/usr/sbin:/sbin ip link set lo up && exec "$@"', "offline")


@dataclass(frozen=True)
class Figure:
    """One command: its wall time, its processor time, and how long it may take where that was promised."""

    name: str
    seconds: float
    processor_seconds: float
    limit: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)  # seconds of what it says about itself

    def __str__(self) -> str:
        promised = f", at most {self.limit:g} promised" if self.limit else ""
        return f"{self.name}: {self.seconds:.1f} s, {self.processor_seconds:.1f} s of processors{promised}"


def run(where: Folders, asked: Sequence[str]) -> Path:
    """Measure in `where.out`, which is emptied; `asked` are further options of `bundle channel`. The JSON's path.

    Raises ToolError with the output of a command that fails.
    """
    if where.out == where.tree / "out":
        raise ToolError("bench empties its folder: name one of its own, `--out out/bench-bundle`")
    if not is_ours(where.out, _MARK):
        raise ToolError(f"{where.out} would be emptied, and holds what no bench made: name an empty or a new folder")
    load = os.getloadavg()
    shutil.rmtree(where.out, ignore_errors=True)
    where.out.mkdir(parents=True)
    (where.out / _MARK).touch()
    bundle = [sys.executable, "-m", "bundle", "--out", str(where.out)]
    prefix = where.out / "envs" / "pytorch"
    env = [*bundle, "env", "pytorch", "--no-smoke", "--prefix"]
    unpacked = where.out / "first"
    figures = [
        _timed("channel, from nothing", [*bundle, "channel", *asked], where, limit=300),
        _timed("channel, nothing changed", [*bundle, "channel", *asked], where, limit=15),
        # As on a machine that has the channel and nothing else: every package is unpacked first.
        _timed("bascule-pytorch and the example's needs, the first time", [*env, str(unpacked / "prefix")], where,
               {**os.environ, "RATTLER_CACHE_DIR": str(unpacked / "cache")}, limit=30),
        _timed("bascule-pytorch and the example's needs into another prefix", [*env, str(prefix)], where, limit=30),
    ]  # fmt: skip
    shutil.rmtree(unpacked)
    inside = smoke.environment(prefix)
    offline = list(OFFLINE) if os.geteuid() == 0 else []
    say("the rest runs without a network" if offline else "the rest runs with a network: only root can leave it")
    data = where.out / "brain"
    train = ["lms", "run", "--budget", "20MB", "examples/brain_mri/train.py", "--resolution", "4", "--steps", "2"]
    figures += [
        _timed("two steps of examples/brain_mri under lms run", [*offline, *train, "--data", str(data)], where, inside),
        _timed("an allreduce of two ranks under ddlrun",
               [*offline, "ddlrun", "-np", "2", "python", "-c", REDUCE], where, inside),
        _timed("mirror of pytorch", [*bundle, "mirror", "pytorch"], where),
        _timed("verify_mirror", [str(where.out / "mirror" / "verify_mirror")], where),
    ]  # fmt: skip
    made = where.out / "bundle.json"
    sizes = {
        name: sum(path.stat().st_size for path in (where.out / name).rglob("*") if path.is_file())
        for name in ("channel", "stand-in/channel", "envs/pytorch", "mirror")
    }
    document = {
        "machine": {"cores": os.cpu_count(), "system": system(), "processor": processor()},
        "versions": {name: metadata.version(name) for name in ("py-rattler", "py-rattler-build", "torch")},
        "python": platform.python_version(),
        "load_before": load,
        "offline": bool(offline),  # training, the allreduce
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
    begun, used = time.monotonic(), _processor_seconds()
    done = subprocess.run(
        [program, *command[1:]],
        cwd=where.tree,
        env=dict(variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    seconds = time.monotonic() - begun
    # Where the folder lies is nobody's business but the machine's.
    parts = {part.replace(f"{where.out}/", ""): float(taken) for part, taken in _PART.findall(done.stderr)}
    figure = Figure(name, seconds, _processor_seconds() - used, limit, parts)
    if done.returncode:
        raise ToolError(f"{name} fails with status {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    say(str(figure))
    return figure


def _processor_seconds() -> float:
    """Of all processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def system() -> str:
    """The system, with the first two numbers of the kernel's version and not the build that a host runs."""
    found = re.match(r"\d+\.\d+", platform.release())
    return f"{platform.system()} {found[0] if found else ''} {platform.machine()}, {' '.join(platform.libc_ver())}"


def processor() -> str:
    """Its name, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
