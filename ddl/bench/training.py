"""Measure a training step over ddl and gloo: `make bench-training`, or `python ddl/bench/training.py --quick`."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import step_chart
from harness import Benchmark, Tell, ddlrun
from runs import Run, Scenario, Verdict
from steps import DDL, GLOO, faults, judge, steps_of, table

from ddl.launch.arguments import read
from ddl.planning import picture
from ddl.planning.units import format_size, format_time
from testbed import Testbed

TRAINEE = Path(__file__).with_name("trainee.py")


@dataclass(frozen=True)
class Training(Scenario):
    """Training steps on one cluster."""

    rounds: int = 12  # a multiple of twice the contestants (with ALONE): each follows each other equally often
    contestants: tuple[str, ...] = (DDL, GLOO)
    batch: int = 2  # images a rank and step
    width: int = 64  # channels of the first stage
    judged: bool = False


ALL = (
    Training("host", "one host, a rank on each of its 2 cores: shared memory", racks=(), ranks=2, batch=8),
    Training("racks", "2 racks x 2 hosts x 1 rank", racks=(2, 2), ranks=1, judged=True),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add --contestants."""
    listed = "these; MB: of a bucket (default: ddl,gloo)"
    parser.add_argument("--contestants", type=read(_contestants), metavar="NAME[:MB],...", help=listed)


def adapted(scenario: Training, asked: argparse.Namespace) -> Training:
    """The scenario with other contestants, or in small."""
    if asked.contestants:
        rounds = 2 * (len(asked.contestants) + 1)
        scenario = replace(scenario, contestants=asked.contestants, rounds=rounds)
    if asked.quick:
        scenario = replace(scenario, width=8, rounds=2, link="1gbit", uplink="500mbit", judged=False)
    return scenario


def work(scenario: Training, tell: Tell, bed: Testbed | None) -> list[dict[str, Any]]:
    """Train with all contestants in one job."""
    tell(f"{scenario.rounds} rounds of {', '.join(scenario.contestants)}")
    words = [sys.executable, str(TRAINEE), "--contestants", ",".join(scenario.contestants)]
    for option in ("batch", "width", "rounds"):
        words += [f"--{option}", str(getattr(scenario, option))]
    return [ddlrun(scenario, bed, [], words)]


def report(run: Run[Training]) -> list[str]:
    """The table of the steps, and whether they were right."""
    batch, nbytes = run.scenario.batch, run.records[0]["bytes"]
    bound, steps = run.bound(nbytes), steps_of(run.records[0])
    said = [f"{batch} image{'' if batch == 1 else 's'} a rank, {format_size(nbytes)} of gradients"]
    said += [f"bound of one allreduce of all gradients: {format_time(bound)}"] if bound else []
    wrong = [f"WRONG      {one}" for one in faults(steps)]
    right = ["right      the losses of all contestants, and the parameters on all ranks"]
    return [*said, table(steps, bound), *(wrong or right)]


def verdicts(run: Run[Training]) -> list[Verdict]:
    """As `steps` says."""
    (record,) = run.records
    return judge(steps_of(record), run.bound(record["bytes"])) if run.scenario.judged else []


def keep(folder: Path, runs: Sequence[Run[Training]]) -> None:
    """Write a picture of the last run."""
    last = runs[-1]
    (record,) = last.records
    title = f"a training step, {format_size(record['bytes'])} of gradients: {last.scenario.title}"
    figure = step_chart.draw(steps_of(record), last.bound(record["bytes"]), title)
    picture.write(figure, folder / f"training_{last.scenario.name}.svg")


def _contestants(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if DDL not in names or not all(re.fullmatch(r"(ddl|gloo)(:[\d.]+)?", name) for name in names):
        raise ValueError(f"{text!r}: expected ddl and others, such as ddl,gloo,ddl:5,gloo:100")
    return names


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 1 if a training could not be run, or computed something wrong."""
    what = "Time a training step over ddl and gloo"
    bench = Benchmark(
        "ddl/bench/training.py", what, "training", ALL, adapted, work, report, verdicts, keep, add_options
    )
    done, whole = bench.main(argv)
    return 0 if whole and not any(faults(steps_of(run.records[0])) for run in done) else 1


if __name__ == "__main__":
    sys.exit(main())
