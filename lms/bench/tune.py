"""Measure `lms tune`: what it costs over a loop in a shell, and what two trials at once gain.

    python lms/bench/tune.py            half an hour on two cores; JSON to out/bench/tune.json

Everything runs in a cgroup that has `--quota` of one core, so that other programs on the machine take nothing away and
two processes get no more than one: that quota is the device. It needs root. In each round every contestant runs once:

    over the loop   seconds of `lms tune --at-once 1` / seconds of the same `lms run` commands in a loop of sh
    idle, packed    seconds of `--at-once 1` / seconds of `--at-once 2` in the same memory; each step is followed by a
                    pause in which nothing is computed, as long as the step takes alone
    busy, packed    the same without the pause

The figure of each is the median over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = Path(__file__).with_name("tune_script.py")
LMS = [sys.executable, "-m", "lms"]
PERIOD = 100_000  # microseconds


@contextmanager
def quota(share: float) -> Iterator[None]:
    """Let this process and what it starts have `share` of one core, by cgroup v1 or v2."""
    v1 = Path("/sys/fs/cgroup/cpu")
    group = (v1 if v1.is_dir() else v1.parent) / f"lms-bench-tune-{os.getpid()}"
    group.mkdir()
    try:
        if v1.is_dir():
            (group / "cpu.cfs_period_us").write_text(str(PERIOD))
            (group / "cpu.cfs_quota_us").write_text(str(int(share * PERIOD)))
            (group / "cpu.shares").write_text("8192")  # its quota is small; let it have that
        else:
            (group / "cpu.max").write_text(f"{int(share * PERIOD)} {PERIOD}")
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (group.parent / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def seconds(words: Sequence[str], folder: Path) -> float:
    """How long a command takes; its output goes to a file. Raises CalledProcessError with the end of that."""
    began = time.monotonic()
    with (folder / "output").open("w+") as output:
        status = subprocess.run(words, cwd=folder, stdout=output, stderr=subprocess.STDOUT).returncode
        took = time.monotonic() - began
        if status:
            output.seek(0)
            raise subprocess.CalledProcessError(status, words, output.read()[-3000:])
    return took


def tune(asked: argparse.Namespace, at_once: int, idle: float) -> float:
    """Seconds of a search in a database of its own."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--trials", str(asked.trials), "--at-once", str(at_once), "--memory", asked.memory]
        options += ["--param", "lr=loguniform:1e-4:1e-1", "--metric", "loss"]
        words = [str(SCRIPT), "--steps", str(asked.steps), "--idle", str(idle)]
        return seconds([*LMS, "tune", *options, *words], Path(folder))


def loop(asked: argparse.Namespace) -> float:
    """Seconds of the same trials in a loop of sh."""
    with tempfile.TemporaryDirectory() as folder:
        run = [*LMS, "run", "--limit", asked.memory, str(SCRIPT), "--steps", str(asked.steps)]
        rates = [f"{10 ** -(1 + at % 3):g}" for at in range(asked.trials)]
        body = f"for lr in {' '.join(rates)}; do {shlex.join(run)} --lr=$lr > $lr.log 2>&1 || exit 1; done"
        return seconds(["sh", "-c", body], Path(folder))


def step_seconds(asked: argparse.Namespace) -> float:
    """What a step takes alone: the processor time that the script prints, over the quota."""
    words = [*LMS, "run", "--limit", asked.memory, str(SCRIPT), "--steps", "5", "--lr=0.01"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    found = re.search(r"a step computes for (\S+) s", done.stdout)
    assert found is not None, done.stdout
    return float(found[1]) / float(asked.quota)


def main() -> int:
    """Run the rounds; print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--memory", default="1GB", help="of all trials: two at once must swap (1GB)")
    parser.add_argument("--quota", type=float, default=0.6, help="of one core (0.6)")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "out/bench/tune.json")
    asked = parser.parse_args()
    rows: list[dict[str, float]] = []
    with quota(asked.quota):
        idle = step_seconds(asked)
        print(f"a step takes {idle:.3f} s alone", flush=True)
        for _ in range(asked.rounds):
            row = {"loop": loop(asked), "tune": tune(asked, 1, 0)}  # the second is "busy, one at a time" too
            row |= {"busy 2": tune(asked, 2, 0), "idle 1": tune(asked, 1, idle), "idle 2": tune(asked, 2, idle)}
            rows.append(row)
            print(", ".join(f"{name} {value:.1f} s" for name, value in row.items()), flush=True)
    figures = {
        "over the loop": median(row["tune"] / row["loop"] for row in rows),
        "idle, packed": median(row["idle 1"] / row["idle 2"] for row in rows),
        "busy, packed": median(row["tune"] / row["busy 2"] for row in rows),
    }
    for name, value in figures.items():
        print(f"{name}: {value:.3f}")
    kernel = ".".join(platform.release().split(".")[:2])
    machine = {"platform": f"Linux {kernel} {platform.machine()}", "cores": os.cpu_count()}
    machine["python"] = platform.python_version()
    settings = {key: value for key, value in vars(asked).items() if key != "output"}
    document = {"machine": machine, "settings": settings, "step": idle, "seconds": rows, "figures": figures}
    asked.output.parent.mkdir(parents=True, exist_ok=True)
    asked.output.write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
