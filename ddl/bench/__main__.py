"""Measure DDL beside its peers on the virtual cluster: `make bench-ddl`, or `python ddl/bench --quick`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import machine
from harness import Benchmark
from page import bound_of, page
from runs import Run
from scenarios import ALL, Scenario, quick
from shaped import ROOT, measured
from verdicts import judge, left_out_of, lines, turns_of

from ddl.bench import chart, figures
from ddl.bench.contestants import DDL
from ddl.launch import output
from ddl.planning import picture


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 1 if a scenario could not be run."""
    bench: Benchmark[Scenario, Run] = Benchmark("ddl/bench", "Time DDL beside its peers", ALL)
    asked = bench.parser.parse_args(argv)
    mpich = _mpich()

    def measure(scenario: Scenario, tell: Callable[[str], None]) -> Run:
        return measured(quick(scenario) if asked.quick else scenario, mpich, tell)

    _, whole = bench.run(asked, measure, report, _keep)
    return 0 if whole else 1


def report(run: Run) -> list[str]:
    """A scenario's table and verdicts, as text."""
    said = [run.scenario.title]
    if run.before is not None and run.after is not None:
        said += [f"calibrated before: {run.before}", f"calibrated after: {run.after}"]
    ranks = run.scenario.ranks * run.scenario.hosts
    for order, record in run.records:
        if len(run.records) > 1:
            said.append(f"hosts {' '.join(map(str, order))}:")
        said.append(figures.table(turns_of(record), ranks, DDL, bound_of(run)))
        said += [figures.words(one) for one in left_out_of(record)]
        if ranks > (os.cpu_count() or 1) and any(one.name.startswith("MPICH") for one in turns_of(record)):
            said.append("MPICH's ranks poll, and are more than the cores: its rows measure that, too")
    return [*said, *lines(judge(run))]


def _keep(folder: Path, runs: Sequence[Run]) -> None:
    made = [
        {
            "scenario": asdict(run.scenario),
            "before": run.before and asdict(run.before),
            "after": run.after and asdict(run.after),
            "tries": run.tries,
            "records": [{"order": order, **record} for order, record in run.records],
            "verdicts": [asdict(one) for one in judge(run)],
        }
        for run in runs
    ]
    machine.write(folder / "ddl.json", {"format": "ddl-bench-1", "runs": made}, mpich=_mpich_version())
    output.write(folder / "ddl.md", page(runs).encode())
    last = runs[-1]
    if len(last.records) == 1:
        title = f"allreduce, float32: {last.scenario.title}"
        figure = chart.draw(turns_of(last.records[0][1]), bound_of(last), title)
        picture.write(figure, folder / f"ddl_{last.scenario.name}.svg")


def _mpich() -> Path | None:
    """The mpirun of PyPI's MPICH, in an environment of its own: it would overwrite Open MPI's in .venv."""
    venv = ROOT / "out" / "mpich"
    launcher = venv / "bin" / "mpirun"
    if launcher.is_file():
        return launcher
    python = shutil.which("python3", path="/usr/local/bin:/usr/bin:/bin") or sys.executable  # .venv has no pip
    pip = [python, "-m", "pip", "--python", str(venv / "bin" / "python"), "--disable-pip-version-check"]
    constraints = str(ROOT / "ci" / "constraints.txt")
    steps = (
        [sys.executable, "-m", "venv", "--without-pip", str(venv)],
        [*pip, "install", "--quiet", "--constraint", constraints, "mpich"],
    )
    for step in steps:
        if subprocess.run(step, stdin=subprocess.DEVNULL).returncode:
            print("without MPICH: it could not be installed (see above)", file=sys.stderr)
            return None
    return launcher


def _mpich_version() -> str:
    found = sorted((ROOT / "out" / "mpich").glob("lib/python*/site-packages/mpich-*.dist-info"))
    return found[0].name.removeprefix("mpich-").removesuffix(".dist-info") if found else ""


if __name__ == "__main__":
    sys.exit(main())
