"""Logistic regression to 1e-4 of the optimum, in memory and larger than memory: python frontends/glm/bench --help.

*Out of core*: a file of three times the limit, in a control group with that limit (needs root; else the limit is the
fit's own). *Distance*: the objective less the best one known, by the best one. Our own runs alternate; figures are
medians, with the least and the most. Other libraries run once, if they are installed (rivals.py).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from cap import Cap, method
from contestant import objective
from datasets import SETS, larger_than_memory
from rivals import RIVALS, snapml_arrays

from bascule_glm import LogisticRegression
from bascule_glm.rows import MemoryRows
from lms.memory.machine import machine

HERE = Path(__file__).parent
FOLDER = Path("out/bench/glm")
Found = dict[str, Any]


def run(name: str, file: Path, limit: int, *, capped: bool, seconds: float = 0, seed: int = 0, ranks: int = 0) -> Found:
    """One contestant in a process of its own; with `capped` in a control group. Raises RuntimeError if it fails."""
    command = [sys.executable, str(HERE / "contestant.py"), name, str(file), str(limit), str(seconds), str(seed)]
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"} if ranks else {}
    if ranks:
        command = [str(Path(sys.executable).with_name("ddlrun")), "-np", str(ranks), *command]
    with ExitStack() as stack:
        cap = stack.enter_context(Cap(limit)) if capped and method() != "RLIMIT_DATA" else None
        done = subprocess.run(
            cap.command(command) if cap else command, env=os.environ | threads, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"{name} ended with {done.returncode}: {done.stdout[-500:]}{done.stderr[-1500:]}")
        line = next(line for line in done.stdout.splitlines() if "found " in line)
        found: Found = json.loads(line.partition("found ")[2])
        found |= {"peak": cap.peak()} if cap else {}
        print(name, ranks or "", found, flush=True)
        return found


def out_of_core(n: int, runs: int) -> list[Found]:
    """Contestants on a file of three times the limit."""
    start = time.monotonic()
    rows = larger_than_memory(FOLDER, n)
    print(f"{rows.path.name}: {rows.nbytes} bytes, made in {time.monotonic() - start:.1f} s", flush=True)
    limit, found = rows.nbytes // 3, list[Found]()
    best = run("optimum", rows.path, 1 << 40, capped=False)["objective"]
    for seed in range(runs):
        ours = run("passes", rows.path, limit, capped=True, seed=seed)
        found.append({"name": "passes, out of core", **ours})
        found.append(
            {"name": "the same, in memory", **run("passes in memory", rows.path, limit, capped=False, seed=seed)}
        )
        seconds = ours["seconds"]
        found.append(
            {
                "name": "partial_fit, out of core",
                **run("partial_fit", rows.path, limit, capped=True, seconds=seconds, seed=seed),
            }
        )
        for ranks in (1, 2):
            of_ranks = run("ranks", rows.path, limit, capped=False, seed=seed, ranks=ranks)
            found.append({"name": f"{ranks} rank(s) of one thread, out of core", **of_ranks})
    for name in ("scikit-learn", *RIVALS):  # far slower, so once
        try:
            theirs = run(name, rows.path, limit, capped=name in ("Vowpal Wabbit", "dask-ml"))
        except RuntimeError as error:  # killed at the limit
            print(error, flush=True)
            continue
        if "missing" not in theirs:
            found.append({"name": name, **theirs})
    return [one | {"distance": one["objective"] / best - 1, "limit": limit, "size": rows.nbytes} for one in found]


def in_memory(runs: int) -> list[Found]:
    """Solvers on arrays: the estimator's choice, scikit-learn's behind the same class, and Snap ML."""
    found = []
    for name, make in SETS.items():
        x, y = make()
        for _ in range(runs):
            for solver in ("auto", "lbfgs", "newton-cg", "newton-cholesky"):
                if solver == "newton-cholesky" and x.shape[1] > 2000:
                    continue
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    start = time.monotonic()
                    model = LogisticRegression(solver=solver).fit(x, y)
                seconds = time.monotonic() - start
                distance = model.gap_ / model.objective_
                best = model.objective_ - model.gap_
                found.append({"name": f"{name}, {solver}", "seconds": seconds, "distance": distance})
            try:
                seconds, parameters = snapml_arrays(x, y)
            except ImportError:
                continue
            distance = objective(MemoryRows(x, y), parameters) / best - 1
            found.append({"name": f"{name}, Snap ML", "seconds": seconds, "distance": distance})
    return found


def table(found: list[Found]) -> str:
    """A Markdown table: medians, with the least and the most."""
    lines = ["| what | seconds | distance | passes | peak of the control group |", "|---|---|---|---|---|"]
    for name in dict.fromkeys(one["name"] for one in found):
        of_it = [one for one in found if one["name"] == name]
        seconds, distances = ([one[key] for one in of_it] for key in ("seconds", "distance"))
        passes = f"{statistics.median(one['passes'] for one in of_it):g}" if "passes" in of_it[0] else ""
        peaks = [one["peak"] for one in of_it if one.get("peak")]
        lines.append(
            f"| {name} | {statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f}) "
            f"| {statistics.median(distances):.1e} | {passes} "
            f"| {f'{max(peaks) / 1e6:.0f} MB' if peaks else ''} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure, print the tables and write a JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2_400_000, help="of the file that is larger than memory")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", choices=("memory", "out-of-core"))
    asked = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"machine": machine(), "load": os.getloadavg()}
    if asked.only != "memory":
        result["out of core"] = out_of_core(asked.rows, asked.runs)
        print(table(result["out of core"]), flush=True)
    if asked.only != "out-of-core":
        result["in memory"] = in_memory(asked.runs)
        print(table(result["in memory"]), flush=True)
    (FOLDER / "glm.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
