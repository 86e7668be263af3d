"""The harness of the benchmarks: a command line, and one scenario after the other, here or on a virtual cluster.

On a virtual cluster the links are calibrated before and after the work. If the two calibrations differ by more than 5%,
the machine was busy with other work, and the work is repeated.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "testbed"))

import machine  # noqa: E402
from runs import Goodput, Run, Scenario, ScenarioT, Verdict  # noqa: E402

from ddl.launch.arguments import read  # noqa: E402
from goodput import measure  # noqa: E402 - of the testbed, which is no package
from testbed import AGENT, Testbed, Topology, cluster, obstacle, running  # noqa: E402

APART = 0.05  # how much two calibrations may differ
TRIES = 3
SECONDS = 2.0  # of a calibration's window
END_SECONDS = 30  # for ddlrun to clean up after SIGTERM

Tell = Callable[[str], None]
# Runs a scenario's jobs and returns their records; without a virtual cluster, on this host. Raises BenchError.
Work = Callable[[ScenarioT, Tell, Testbed | None], list[dict[str, Any]]]


class BenchError(RuntimeError):
    """A ddlrun job failed, or the links were never steady; the message has the job's last words."""


@dataclass(frozen=True)
class Benchmark(Generic[ScenarioT]):
    """A benchmark: `prog` is its command, `what` describes it, `file` is the name of its JSON."""

    prog: str
    what: str
    file: str
    scenarios: Sequence[ScenarioT]
    adapted: Callable[[ScenarioT, argparse.Namespace], ScenarioT]  # to the options
    work: Work[ScenarioT]
    report: Callable[[Run[ScenarioT]], list[str]]  # the lines between the head and the verdicts
    judge: Callable[[Run[ScenarioT]], list[Verdict]]
    keep: Callable[[Path, Sequence[Run[ScenarioT]]], None]  # writes tables and pictures
    add_options: Callable[[argparse.ArgumentParser], object] = lambda parser: None
    versions: Callable[[], dict[str, str]] = dict  # of what it uses besides

    def main(self, argv: Sequence[str] | None = None) -> tuple[list[Run[ScenarioT]], bool]:
        """The command line: measure each scenario, print its report, and keep the results so far.

        Returns them, and whether none failed.
        """
        asked = self._parser().parse_args(argv)
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # unwinds, and so cleans up
        asked.output.mkdir(parents=True, exist_ok=True)
        machine.OUT.mkdir(parents=True, exist_ok=True)
        done: list[Run[ScenarioT]] = []
        whole = True
        for scenario in asked.scenarios:
            if scenario.racks and (reason := obstacle()):
                print(f"without {scenario.name}: {reason}", file=sys.stderr)
                continue
            try:
                tell = partial(_tell, scenario.name)
                done.append(steady(self.adapted(scenario, asked), self.work, tell))
            except BenchError as error:
                print(f"bench: {error}", file=sys.stderr)
                whole = False
                continue
            print("", *done[-1].head, *self.report(done[-1]), *self.judge(done[-1]), sep="\n", flush=True)
            # Kept even if a later scenario fails.
            runs = [asdict(run) | {"verdicts": list(map(asdict, self.judge(run)))} for run in done]
            figures = {"format": f"ddl-{self.file}-2", "runs": runs}
            machine.write(asked.output / f"{self.file}.json", figures, **self.versions())
            self.keep(asked.output, done)
        print(f"\nwrote what was measured to {asked.output}")
        return done, whole

    def _parser(self) -> argparse.ArgumentParser:
        names = {one.name: one for one in self.scenarios}

        def chosen(text: str) -> list[ScenarioT]:
            if unknown := set(text.split(",")) - set(names):
                raise ValueError(f"unknown: {min(unknown)}; expected some of {','.join(names)}")
            return [names[name] for name in text.split(",")]

        listed = "\n".join(f"  {one.name:8} {one.title}" for one in self.scenarios)
        parser = argparse.ArgumentParser(
            prog=self.prog,
            description=f"{self.what}, in one run each:\n{listed}\nAll but the first need root.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add = parser.add_argument
        add("--quick", action="store_true", help="in small: shows that it runs, its figures mean nothing")
        add("--scenarios", type=read(chosen), default=self.scenarios, metavar="NAME,...", help="some of them")
        add("--output", type=Path, default=machine.OUT, metavar="DIR", help="for the figures, tables and pictures")
        self.add_options(parser)
        return parser


def _tell(scenario: str, text: str) -> None:
    print(f"{scenario}: {text}", file=sys.stderr, flush=True)


def calibrate(bed: Testbed) -> Goodput:
    """The goodput of a host's link inside its rack, and of an uplink with a flow from each host of a rack."""
    racks = [[host.name for host in rack.hosts] for rack in bed.topology.racks]
    (link,) = measure(bed, [(racks[0][0], racks[0][1])], SECONDS)
    if len(racks) == 1:
        return Goodput(link / 8)
    return Goodput(link / 8, sum(measure(bed, list(zip(racks[0], racks[1], strict=True)), SECONDS)) / 8)


def steady(
    scenario: ScenarioT,
    work: Work[ScenarioT],
    tell: Tell,
    *,
    running: Callable[[Topology], AbstractContextManager[Testbed]] = running,
    calibrate: Callable[[Testbed], Goodput] = calibrate,
) -> Run[ScenarioT]:
    """Do `work`, on a virtual cluster until the calibrations before and after it agree. Raises BenchError.

    `running` makes the cluster, a new one for each try; `calibrate` measures its links.
    """
    if not scenario.racks:
        return Run(scenario, work(scenario, tell, None))
    uplink = scenario.uplink if len(scenario.racks) > 1 else None
    for tried in range(1, TRIES + 1):
        with running(cluster(scenario.racks, link=scenario.link, uplink=uplink)) as bed:
            tell("calibration")
            before = calibrate(bed)
            records = work(scenario, tell, bed)
            tell("calibration")
            after = calibrate(bed)
        if before.apart(after) <= APART:
            return Run(scenario, records, before, after, tried)
        tell(f"the links' goodput changed by {before.apart(after):.0%} meanwhile: once more")
    raise BenchError(f"{scenario.name}: the links' goodput was never the same within {APART:.0%} before and after")


def ddlrun(
    scenario: Scenario, bed: Testbed | None, verb: Sequence[str], words: Sequence[str], order: Sequence[int] = ()
) -> dict[str, Any]:
    """Run `ddlrun VERB` on this host, or on all hosts of `bed` in `order`; `words` and --json FILE come last.

    Returns the JSON. Raises BenchError if there is none, or if it has an error. If this program is ended, it ends
    ddlrun, which cleans up.
    """
    command = [str(Path(sys.executable).with_name("ddlrun")), *verb, "-np", str(scenario.size)]
    with tempfile.TemporaryDirectory(prefix="ddl-bench-", dir=ROOT / "out") as folder:  # the hosts see this one
        record = Path(folder, "record.json")
        words = [*words, "--json", str(record)]
        if bed is None:
            command += words
        else:
            hosts = ",".join(bed.hosts[at] for at in order or range(len(bed.hosts)))
            # All hosts share the same few cores: a rank that polls without yielding would keep others from them.
            command += ["-H", hosts, "--mpiarg", "--mca mpi_yield_when_idle 1", *words]
            command = bed.command("h0", command, env={"PRTE_MCA_plm_ssh_agent": str(AGENT)}, cwd=ROOT)
        status, errors = _run(command)
        found: dict[str, Any] = json.loads(record.read_text()) if record.is_file() else {"error": "it wrote nothing"}
    # A peer's wrong sum is in the record, and was printed.
    if found.get("error") or (status and not found.get("left_out")):
        raise BenchError(f"{scenario.name}: ddlrun ended with {status}: {errors.strip()[-2000:]}")
    return found


def _run(command: Sequence[str]) -> tuple[int, str]:
    quiet = subprocess.DEVNULL
    with subprocess.Popen(
        command, stdin=quiet, stdout=quiet, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        try:
            _, errors = process.communicate()
            return process.returncode, errors
        except BaseException:
            process.terminate()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
