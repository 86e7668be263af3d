"""Measure DDL beside its peers on the virtual cluster: `make bench-ddl`, or `python ddl/bench --quick`."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import machine
from page import bound_of, page
from runs import Run
from scenarios import ALL, Scenario, quick
from shaped import ROOT, BenchError, measured
from verdicts import judge, left_out_of, lines, turns_of

from ddl.bench import chart, figures
from ddl.bench.contestants import DDL
from ddl.launch import output
from ddl.planning import picture
from ddl.planning.units import format_bits
from testbed import obstacle


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 1 where a scenario could not be run."""
    args = _arguments(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    mpich = _mpich()
    runs: list[Run] = []
    status = 0
    for scenario in args.scenarios:
        if scenario.racks and (reason := obstacle()):
            print(f"without {scenario.name}: {reason}", file=sys.stderr)
            continue
        try:
            made = measured(quick(scenario) if args.quick else scenario, mpich, partial(_tell, scenario.name))
        except BenchError as error:
            print(f"bench: {error}", file=sys.stderr)
            status = 1
            continue
        runs.append(made)
        print("\n" + "\n".join(report(made)), flush=True)
        _write(args.output, runs)  # what was measured stays, whatever comes next
        if len(made.records) == 1:
            title = f"allreduce, float32: {scenario.title}"
            figure = chart.draw(turns_of(made.records[0][1]), bound_of(made), title)
            picture.write(figure, args.output / f"ddl_{scenario.name}.svg")
    print(f"\nwrote {args.output / 'ddl.json'} and ddl.md, its tables")
    return status


def _tell(scenario: str, text: str) -> None:
    print(f"{scenario}: {text}", file=sys.stderr, flush=True)


def report(run: Run) -> list[str]:
    """A scenario's table and verdicts, as text."""
    said = [run.scenario.title]
    if run.before is not None and run.after is not None:
        for name, one in (("before", run.before), ("after", run.after)):
            uplink = f", an uplink {format_bits(one.uplink)}" if one.uplink else ""
            said.append(f"calibrated {name}: a link {format_bits(one.link)}{uplink}")
    ranks = run.scenario.ranks * run.scenario.hosts
    for order, record in run.records:
        if len(run.records) > 1:
            said.append(f"hosts {' '.join(map(str, order))}:")
        said.append(figures.table(turns_of(record), ranks, DDL, bound_of(run)))
        said += [figures.words(one) for one in left_out_of(record)]
        if ranks > (os.cpu_count() or 1) and any(one.name.startswith("MPICH") for one in turns_of(record)):
            said.append("MPICH's ranks poll, and are more than the cores: its rows measure that, too")
    return [*said, *lines(judge(run))]


def _write(folder: Path, runs: Sequence[Run]) -> None:
    document = {
        "format": "ddl-bench-1",
        "when": machine.now(),
        "machine": machine.described(),
        "versions": machine.versions() | {"mpich": _mpich_version()},
        "runs": [
            {
                "scenario": asdict(run.scenario),
                "before": run.before and asdict(run.before),
                "after": run.after and asdict(run.after),
                "tries": run.tries,
                "records": [{"order": order, **record} for order, record in run.records],
                "verdicts": [asdict(one) for one in judge(run)],
            }
            for run in runs
        ],
    }
    for name, text in (("ddl.json", json.dumps(document, indent=1) + "\n"), ("ddl.md", page(runs))):
        output.write(folder / name, text.encode())


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


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    names = {scenario.name: scenario for scenario in ALL}

    def read(text: str) -> list[Scenario]:
        if unknown := set(text.split(",")) - set(names):
            raise argparse.ArgumentTypeError(f"unknown: {min(unknown)}; expected some of {','.join(names)}")
        return [names[name] for name in text.split(",")]

    listed = "\n".join(f"  {scenario.name:8} {scenario.title}" for scenario in ALL)
    parser = argparse.ArgumentParser(
        prog="ddl/bench",
        description=f"Time DDL beside its peers, in one run each:\n{listed}\nAll but the first need root.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="in small: shows that it runs, its figures mean nothing")
    parser.add_argument("--scenarios", type=read, default=list(ALL), metavar="NAME,...", help="some of them")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "out" / "bench", metavar="DIR", help="for ddl.json, ddl.md, *.svg"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # what runs is ended, and put back
    sys.exit(main())
