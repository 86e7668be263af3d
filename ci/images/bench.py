"""How long images take and how large they are: one JSON with the machine, each figure beside what it must reach.

    make bench-images

A time is the wall time of what its name says, the median of so many runs as `runs` holds. Everything is made in a
folder of its own, from a copy of this tree, because one of the figures is for a changed source. Containers run without
a network, or on one that leads nowhere.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from bundle.bench import REDUCE, processor, system
from bundle.folders import copy
from images import root
from images.cli import MADE, MADE_HERE
from images.engine import Engine, Podman
from images.errors import ImageError

_TREE = Path(__file__).parents[2]
_CHANGED = "lms/src/lms/plan.py"  # of the source change: packages of it, over it and beside it are built again
_RUNS = 3
_UNDER_LMS = ("lms", "run", "--budget", "20MB")
_TRAIN = ("examples/brain_mri/train.py", "--resolution", "4", "--steps", "1", "--data", "/data")


@dataclass(frozen=True)
class Figure:
    """A time in seconds or a size in MB (10^6 bytes), and what it must stay below where that was promised."""

    name: str
    value: float
    unit: str
    limit: float | None = None
    runs: tuple[float, ...] = ()

    def __str__(self) -> str:
        promised = f", must be below {self.limit:g}" if self.limit else ""
        return f"{self.name}: {self.value:.1f} {self.unit}{promised}"


def main() -> int:
    """Measure; the exit status: 0, 1 for an error."""
    parser = argparse.ArgumentParser(prog="images.bench", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base-image", default="mmdebstrap", metavar="IMAGE", help="the operating system")
    parser.add_argument(
        "--out", type=Path, default=_TREE / "out/bench-images", metavar="DIR",
        help="a channel that is there is used and kept (default: out/bench-images)",
    )  # fmt: skip
    args = parser.parse_args()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix="tree.", dir=out) as folder:
            tree = Path(folder, "bascule")
            copy(_TREE, tree)
            document = measure(Bench(tree, out, args.base_image, Podman("")))
    except ImageError as error:
        print(f"bench: error: {error}", file=sys.stderr)
        return 1
    made = out / "images.json"
    made.write_text(json.dumps(document, indent=1) + "\n")
    say(f"all figures, with the machine: {made}")
    return 0


def say(words: str) -> None:
    """Tell the user."""
    print(f"bench: {words}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Bench:
    """Where and from what images are made here; podman makes and runs them."""

    tree: Path
    out: Path
    base_image: str
    engine: Engine

    def channel(self) -> None:
        """`make channel`. Raises ImageError."""
        self._in_ci("bundle", "--out", self.out, "channel", "--frameworks", "pytorch")

    def image(self, name: str) -> str:
        """`make image`; its reference. Raises ImageError."""
        where = ("--out", self.out, "--engine", self.engine.name, "--base-image", self.base_image)
        said = self._in_ci("images", name, *where)
        ((reference, _, _),) = MADE.findall(said)
        return str(reference)

    def run(self, *words: str | Path) -> list[str]:
        """The words of `podman run` without a network, in a container that is removed."""
        fixed = ("run", "--rm", "--no-healthcheck", "--network", "none", *self.engine.limits())
        return [self.engine.name, *fixed, *map(str, words)]

    def _in_ci(self, *words: str | Path) -> str:
        path = f"{self.tree}/ci:{self.tree}/recipes/bascule-tools/src"
        return finished([sys.executable, "-m", *map(str, words)], os.environ | {"PYTHONPATH": path}).stderr


def measure(bench: Bench) -> dict[str, object]:
    """All figures, as they go into the JSON. Raises ImageError with the output of what fails."""
    load = os.getloadavg()
    say("the channel and the images as they are, which is not measured")
    bench.channel()
    base, pytorch = bench.image("base"), bench.image("pytorch")
    figures = [*sizes(bench, base, pytorch), *times(bench, base, pytorch), *changes(bench)]
    for figure in figures:
        say(str(figure))
    return {
        "machine": {"cores": os.cpu_count(), "system": system(), "processor": processor()},
        "versions": {
            "podman": bench.engine.run("version", "--format", "{{.Client.Version}}").strip(),
            "base_image": bench.base_image,
            "pytorch image": pytorch,
        },
        "python": platform.python_version(),
        "load_before": load,
        "load_after": os.getloadavg(),
        "figures": [asdict(figure) for figure in figures],
    }


def sizes(bench: Bench, base: str, pytorch: str) -> list[Figure]:
    """What images take over the operating system's layer, and beside their environment.

    That layer has OpenSSH, tini and the libraries that packages look for in a system; an operating system of Debian's
    essential packages alone, with what is put on it, is the other way to count, where one can be made.
    """

    def over_system(reference: str) -> float:
        layers = json.loads(bench.engine.run("history", "--format", "json", reference))
        return float(sum(layer["size"] for layer in layers[:-1])) / 1e6  # the oldest, which comes last, is the system

    def environment(reference: str) -> float:
        said = finished(bench.run(reference, "du", "-sbx", "/opt/conda")).stdout
        return int(said.split()[0]) / 1e6

    whole, inside = over_system(pytorch), environment(pytorch)
    essential = []
    if bench.base_image == MADE_HERE:
        over = (bench.engine.size(base) or 0) - (bench.engine.size(root.make(bench.engine, ())) or 0)
        essential.append(Figure("base: over Debian's essential packages alone", over / 1e6, "MB", 250))
    return [
        Figure("base: over its operating system", over_system(base), "MB", 250),
        *essential,
        Figure("pytorch: over its operating system", whole, "MB"),
        Figure("pytorch: its environment", inside, "MB"),
        Figure("pytorch: beside its environment", whole - inside, "MB", 60),
    ]


def times(bench: Bench, base: str, pytorch: str) -> list[Figure]:
    """What a user waits for."""
    data = bench.out / "brain"
    data.mkdir(exist_ok=True)
    shutil.chown(data, 1000, 1000)
    mounted = ("--volume", f"{bench.tree}:/workspace:ro", "--volume", f"{data}:/data", "--env", "PYTHONUNBUFFERED=1")
    train = bench.run(*mounted, pytorch, *_UNDER_LMS, *_TRAIN)
    plain = bench.run(*mounted, pytorch, "python", *_TRAIN)
    first_line(plain, "step 1 ")  # the example prepares its data, which is not measured
    step = bench.run(*mounted, pytorch, "lms", "run", "--budget", "2MB", "recipes/lms/step.py")
    with hosts(bench, base) as first:
        reduce = [bench.engine.name, "exec", first, "ddlrun", "-H", "c1,c2", "python", "-c", REDUCE]
        both = _timed("ddlrun -H c1,c2 in one of two containers: an allreduce of 8 MB", lambda: _done(reduce))
    return [
        _timed("podman run lms --version", lambda: _done(bench.run(base, "lms", "--version"))),
        _timed("podman run lms run, to the end of the first step of recipes/lms/step.py",
               lambda: first_line(step, "0 "), 10),
        _timed("podman run lms run, to the end of the first step of examples/brain_mri",
               lambda: first_line(train, "step 1 "), 10),
        _timed("podman run python, to the end of the first step of examples/brain_mri",
               lambda: first_line(plain, "step 1 "), 10),
        both,
    ]  # fmt: skip


def changes(bench: Bench) -> list[Figure]:
    """What it takes to have an image again after a change of ours."""
    same = _timed("make image ENV=pytorch, nothing changed", lambda: _of(bench.image, "pytorch"))
    channels, images = [], []
    for number in range(_RUNS):
        source = bench.tree / _CHANGED
        source.write_text(f"{source.read_text()}\n# change {number}\n")
        channels.append(_of(bench.channel))
        images.append(_of(bench.image, "pytorch"))
    both = [one + other for one, other in zip(channels, images, strict=True)]
    return [
        same,
        Figure(f"make channel after a change of {_CHANGED}", statistics.median(channels), "s", None, tuple(channels)),
        Figure("make image ENV=pytorch after it", statistics.median(images), "s", 20, tuple(images)),
        Figure("both", statistics.median(both), "s", None, tuple(both)),
    ]


@contextmanager
def hosts(bench: Bench, image: str) -> Generator[str]:
    """Two containers that wait as hosts c1 and c2, on a network that leads nowhere else; the first one's name."""
    engine, name = bench.engine, f"bascule-bench-{os.getpid()}"
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder, "id_ed25519")
        finished(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(key)])
        for path in (Path(folder), key):
            shutil.chown(path, 1000, 1000)
        engine.run("network", "create", "--internal", name)
        try:
            for host in ("c1", "c2"):
                engine.run(
                    "run", "--detach", "--no-healthcheck", "--network", name, "--name", f"{name}-{host}",
                    "--hostname", host, "--network-alias", host, "--volume", f"{folder}:/etc/bascule/ssh:ro",
                    *engine.limits(), image,
                )  # fmt: skip
            _until(lambda: all("listens" in _said(engine, f"{name}-{host}") for host in ("c1", "c2")))
            yield f"{name}-c1"
        finally:
            for host in ("c1", "c2"):
                engine.run("rm", "--force", "--ignore", "--time", "0", f"{name}-{host}")
            engine.run("network", "rm", "--force", name)


def first_line(command: Sequence[str], begins: str) -> float:
    """Seconds from the start of a command until it has printed a line that begins so. Raises ImageError."""
    began = time.monotonic()
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said, text=True) as job,
    ):
        assert job.stdout is not None
        seconds = next((time.monotonic() - began for line in job.stdout if line.startswith(begins)), None)
        rest = job.stdout.read()
        if job.wait() or seconds is None:
            said.seek(0)
            words = (rest + said.read())[-3000:]
            raise ImageError(f"{' '.join(command[-6:])} fails with status {job.returncode}:\n{words}")
    return seconds


def finished(command: Sequence[str], variables: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """A command that ended well. Raises ImageError with the end of its output."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=variables)
    if done.returncode:
        raise ImageError(
            f"{' '.join(command[:4])} ... fails with status {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}"
        )
    return done


def _timed(name: str, one: Callable[[], float], limit: float | None = None) -> Figure:
    runs = tuple(one() for _ in range(_RUNS))
    return Figure(name, statistics.median(runs), "s", limit, runs)


def _done(command: Sequence[str]) -> float:
    return _of(finished, command)


def _of(work: Callable[..., object], *arguments: object) -> float:
    began = time.monotonic()
    work(*arguments)
    return time.monotonic() - began


def _said(engine: Engine, name: str) -> str:
    done = subprocess.run([engine.name, "logs", name], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return done.stdout + done.stderr


def _until(true: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            raise ImageError(f"the two containers were not ready within {seconds:g} s")
        time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
