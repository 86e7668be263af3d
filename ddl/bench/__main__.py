"""Measure DDL beside its peers on the virtual cluster: `make bench-ddl`, or `python ddl/bench --quick`."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from harness import ROOT, Benchmark, Tell, ddlrun
from page import page
from runs import Run
from scenarios import ALL, Allreduce, quick
from verdicts import judge, left_out_of, turns_of

from ddl.bench import chart, figures
from ddl.bench.contestants import DDL
from ddl.launch import output
from ddl.planning import picture
from testbed import Testbed


def adapted(scenario: Allreduce, asked: argparse.Namespace) -> Allreduce:
    """The scenario as asked: in small, of other sizes, beside some of the peers."""
    chosen = {name: value for name in ("sizes", "rounds", "only") if (value := getattr(asked, name)) is not None}
    return replace(quick(scenario) if asked.quick else scenario, **chosen)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options for a part of each scenario."""
    add = parser.add_argument
    add("--sizes", metavar="A..B|A,B,...", help="in place of a scenario's, as `ddlrun bench` reads them")
    add("--rounds", type=int, metavar="N", help="in place of a scenario's")
    add("--only", metavar="REGEX", help="of the peers, those whose name matches")


def work(scenario: Allreduce, tell: Tell, bed: Testbed | None) -> list[dict[str, Any]]:
    """Run `ddlrun bench`, or once for each order of the hosts in each round."""
    words = ["--sizes", scenario.sizes, "--seconds", str(scenario.seconds)]
    words += ["--rounds", "1" if scenario.orders else str(scenario.rounds)]
    if scenario.compare:
        words += ["--compare", *(["--peer-mpi", str(mpich)] if (mpich := _mpich()) else [])]
        words += ["--only", scenario.only] if scenario.only else []
    records = []
    for order in scenario.orders * scenario.rounds or (tuple(range(sum(scenario.racks))),):
        tell(f"hosts {' '.join(map(str, order)) or 'this one'}")
        records.append({"order": order, **ddlrun(scenario, bed, ["bench"], words, order)})
    return records


def report(run: Run[Allreduce]) -> list[str]:
    """A table for each record."""
    said = []
    bound = run.bound if run.before else None
    for record in run.records:
        turns = turns_of(record)
        if len(run.records) > 1:
            said.append(f"hosts {' '.join(map(str, record['order']))}:")
        said.append(figures.table(turns, run.scenario.size, DDL, bound))
        said += [figures.words(one) for one in left_out_of(record)]
        if run.scenario.size > (os.cpu_count() or 1) and any(one.name.startswith("MPICH") for one in turns):
            said.append("MPICH's ranks poll, and are more than the cores: its rows measure that, too")
    return said


def keep(folder: Path, runs: Sequence[Run[Allreduce]]) -> None:
    """Write the results page, and a picture of the last run."""
    output.write(folder / "ddl.md", page(runs).encode())
    last = runs[-1]
    if len(last.records) == 1:
        title = f"allreduce, float32: {last.scenario.title}"
        figure = chart.draw(turns_of(last.records[0]), last.bound if last.before else None, title)
        picture.write(figure, folder / f"ddl_{last.scenario.name}.svg")


def versions() -> dict[str, str]:
    """MPICH's."""
    found = sorted((ROOT / "out" / "mpich").glob("lib/python*/site-packages/mpich-*.dist-info"))
    return {"mpich": found[0].name.removeprefix("mpich-").removesuffix(".dist-info") if found else ""}


@cache
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


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 1 if a scenario could not be run."""
    bench = Benchmark(
        "ddl/bench", "Time DDL beside its peers", "ddl", ALL, adapted, work, report, judge, keep, add_options, versions
    )
    _, whole = bench.main(argv)
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
