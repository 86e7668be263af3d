"""Measure LMS in trainings of other libraries: `python lms/bench/trainers.py`. docs/benchmarks.md says what and how.

It runs in the environment of `make test-integrations`: `out/integrations/bin/python lms/bench/trainers.py`. In each
round each training runs plain and then with LMS, each time in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from trainings import STEPS, TRAININGS

from lms.memory.machine import machine
from lms.units import format_size

VENV = Path(__file__).resolve().parents[2] / ".venv"
ALL = "activations,optimizer,parameters,gradients"
SHARE = 0.6  # of what plain training adds to the resident set after its imports
MOST_OVER, MOST_CPU = 0.01, 1.15  # the targets: peak over the limit, as a share of it; CPU time over plain's
SETTLED = STEPS // 2  # steps after which LMS has made its last plan
Found = dict[str, Any]


def run(name: str, *arguments: str) -> list[Found]:
    """The figures of each rank; `failed` says why there are none."""
    command = [sys.executable, str(Path(__file__).with_name("trainings.py")), name, *arguments]
    if "two ranks" in name:
        command = [str(VENV / "bin" / "ddlrun"), "-np", "2", *command]
    # Lightning asks mpi4py, which looks beside this environment's Python.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MPI4PY_LIBMPI": str(VENV / "lib" / "libmpi.so.40")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    found = [json.loads(line.split("figures ", 1)[1]) for line in done.stdout.splitlines() if "figures " in line]
    if done.returncode or not found:
        lines = done.stderr.strip().splitlines() or ["nothing was printed"]
        return [{"failed": next((line for line in reversed(lines) if "Error" in line), lines[-1])[:300]}]
    return found


def compared(plain: Sequence[Found], ours: Sequence[Found], limits: Sequence[int]) -> Found:
    """A round in figures."""

    def used(ranks: Sequence[Found], since: int, what: str = "cpu") -> float:
        return float(sum(one[what][-1] - one[what][since] for one in ranks))

    peaks = [max(one["peaks"][1:]) for one in ours]
    return {
        "over": max(peak / limit - 1 for peak, limit in zip(peaks, limits, strict=True)),
        "first": max(one["peaks"][0] / limit - 1 for one, limit in zip(ours, limits, strict=True)),
        "cpu": used(ours, 0) / used(plain, 0),
        "settled": used(ours, SETTLED - 1) / used(plain, SETTLED - 1),
        "seconds": used(ours, SETTLED - 1, "seconds") / used(plain, SETTLED - 1, "seconds"),
        "same": sorted(one["bits"] for one in ours) == sorted(one["bits"] for one in plain),
    }


def measure(name: str, swap: str, rounds: int) -> Found:
    """All rounds of one training."""
    document: Found = {"swap": swap, "rounds": []}
    for _ in range(rounds):
        plain = run(name)
        if "failed" in plain[0]:
            return {**document, "failed": f"plain: {plain[0]['failed']}"}
        added = max(max(one["peaks"][1:]) - one["base"] for one in plain)
        more = int(SHARE * added)
        ours = run(name, str(more), swap)
        one: Found = {"added": added, "plain": plain, "lms": ours}
        document["rounds"].append(one)
        if "failed" in ours[0]:
            return {**document, "failed": ours[0]["failed"]}
        limits = [each["base"] + more for each in ours]
        one |= {"limits": limits, **compared(plain, ours, limits)}
        document["step"] = (plain[0]["seconds"][-1] - plain[0]["seconds"][0]) / (len(plain[0]["seconds"]) - 1)
    return document


def row(name: str, found: Found) -> str:
    """A training in a line: medians of its rounds."""
    if "failed" in found:
        return f"{name:30} FAILED {found['failed']}"
    rounds = found["rounds"]
    over, first, cpu, settled, seconds, added = (
        statistics.median(one[key] for one in rounds) for key in ("over", "first", "cpu", "settled", "seconds", "added")
    )
    limit = statistics.median(max(one["limits"]) for one in rounds)
    same = "the same bits" if all(one["same"] for one in rounds) else "OTHER BITS"
    missed = [what for what, value, most in (("peak", over, MOST_OVER), ("CPU", settled, MOST_CPU)) if value > most]
    return (
        f"{name:30} {found['step']:5.2f} s a step, adds {format_size(int(added))}, limit {format_size(int(limit))}: "
        f"peak {over:+.1%} (first step {first:+.1%}), CPU {settled:.2f} x (with the first steps {cpu:.2f} x), "
        f"time {seconds:.2f} x, {same}{' MISSED ' + ', '.join(missed) if missed else ''}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 1 if a training failed, or had other bits with LMS."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainings", nargs="*", choices=TRAININGS, default=list(TRAININGS), help="(default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default 3)")
    parser.add_argument("--swap", default=ALL, help="what moves (default: all that can)")
    parser.add_argument("-o", "--output", type=Path, help="file for the figures as JSON")
    given = parser.parse_args(arguments)
    document: Found = {"machine": machine(), "trainings": {}}
    for name in given.trainings:
        found = document["trainings"][name] = measure(name, given.swap, given.rounds)
        print(row(name, found), flush=True)
        if given.output is not None:
            given.output.write_text(json.dumps(document, indent=1))
    trainings = document["trainings"].values()
    return int(any("failed" in one or not all(each["same"] for each in one["rounds"]) for one in trainings))


if __name__ == "__main__":
    sys.exit(main())
