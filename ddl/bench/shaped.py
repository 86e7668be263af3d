"""A scenario on the virtual cluster: links calibrated before and after, `ddlrun bench` between.

Calibrations that differ by more than 5% show a machine that was busy with something else: the run is repeated.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "testbed"))

from scenarios import Scenario  # noqa: E402

from goodput import measure  # noqa: E402 - of the testbed, which is no package
from testbed import AGENT, Testbed, cluster, running  # noqa: E402

APART = 0.05  # how far two calibrations may be from one another
TRIES = 3
SECONDS = 2.0  # of a calibration's window
END_SECONDS = 30  # for `ddlrun bench` to put all back when it was asked to end
SHARED_MEMORY = 5e9  # bytes a second: of a rank's link inside its host; no bound comes from it


@dataclass(frozen=True)
class Goodput:
    """What a program gets of a host's link and of a rack's uplink (0: one rack), in bytes a second."""

    link: float
    uplink: float = 0.0

    def apart(self, other: Goodput) -> float:
        """The largest relative distance between the two."""
        pairs = [(self.link, other.link)] + ([(self.uplink, other.uplink)] if self.uplink else [])
        return max(abs(one - two) / max(one, two) for one, two in pairs)


@dataclass(frozen=True)
class Run:
    """The records of a scenario, one for each `ddlrun bench`, by the order of hosts that it was given."""

    scenario: Scenario
    before: Goodput | None
    after: Goodput | None
    records: tuple[tuple[tuple[int, ...], dict[str, object]], ...]
    tries: int = 1

    @property
    def network(self) -> dict[str, object] | None:
        """As `ddlrun plan` reads it, with the mean of the two calibrations."""
        if self.before is None or self.after is None:
            return None
        mid = Goodput(mean([self.before.link, self.after.link]), mean([self.before.uplink, self.after.uplink]))
        return describe(self.scenario, mid)


class BenchError(RuntimeError):
    """`ddlrun bench` failed, or the links would not hold still; the message has its last words."""


def describe(scenario: Scenario, goodput: Goodput) -> dict[str, object]:
    """The scenario's network, as `ddlrun plan` reads it."""
    tiers = [
        {"name": "rank", "size": scenario.ranks, "bandwidth": SHARED_MEMORY},
        {"name": "host", "size": scenario.racks[0], "bandwidth": goodput.link},
    ]
    if len(scenario.racks) > 1:
        tiers.append({"name": "rack", "size": len(scenario.racks), "bandwidth": goodput.uplink})
    return {"name": scenario.title, "tiers": tiers}


def measured(scenario: Scenario, mpich: Path | None, tell: Callable[[str], None]) -> Run:
    """Run a scenario until its calibrations agree. Raises BenchError."""
    if not scenario.racks:
        return Run(scenario, None, None, (((), _bench(scenario, (), mpich, None)),))
    for tried in range(1, TRIES + 1):
        uplink = scenario.uplink if len(scenario.racks) > 1 else None
        with running(cluster(scenario.racks, link=scenario.link, uplink=uplink)) as bed:
            tell("calibration")
            before = calibrate(bed)
            records = []
            orders = scenario.orders or (tuple(range(scenario.hosts)),)
            for order in orders * (scenario.rounds if scenario.orders else 1):
                tell(f"hosts {' '.join(map(str, order))}")
                records.append((order, _bench(scenario, order, mpich, bed)))
            tell("calibration")
            after = calibrate(bed)
        if before.apart(after) <= APART:
            return Run(scenario, before, after, tuple(records), tried)
        tell(f"the links' goodput changed by {before.apart(after):.0%} meanwhile: once more")
    raise BenchError(f"{scenario.name}: the links' goodput was never the same within {APART:.0%} before and after")


def calibrate(bed: Testbed) -> Goodput:
    """The goodput of a host's link within its rack, and of an uplink with a flow from each host of a rack."""
    racks = [[host.name for host in rack.hosts] for rack in bed.topology.racks]
    (link,) = measure(bed, [(racks[0][0], racks[0][1])], SECONDS)
    if len(racks) == 1:
        return Goodput(link / 8)
    return Goodput(link / 8, sum(measure(bed, list(zip(racks[0], racks[1], strict=True)), SECONDS)) / 8)


def _bench(scenario: Scenario, order: Sequence[int], mpich: Path | None, bed: Testbed | None) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="ddl-bench-", dir=ROOT / "out") as folder:  # the hosts see this one
        record = Path(folder, "record.json")
        words = [str(Path(sys.executable).with_name("ddlrun")), "bench", "-np", str(scenario.ranks * scenario.hosts)]
        words += ["--sizes", scenario.sizes, "--seconds", str(scenario.seconds), "--json", str(record)]
        words += ["--rounds", "1" if scenario.orders else str(scenario.rounds)]
        if bed is not None:
            # The hosts' processors are the same few: who polls without yielding keeps another host's rank from them.
            words += ["-H", ",".join(bed.hosts[at] for at in order), "--mpiarg", "--mca mpi_yield_when_idle 1"]
        if scenario.compare:
            words += ["--compare", *(["--peer-mpi", str(mpich)] if mpich else [])]
        if bed is not None:
            words = bed.command("h0", words, env={"PRTE_MCA_plm_ssh_agent": str(AGENT)}, cwd=ROOT)
        status, errors = _run(words)
        found: dict[str, object] = json.loads(record.read_text()) if record.is_file() else {"error": "it wrote nothing"}
        if found["error"] or (status and not found["left_out"]):  # a peer's wrong sum is in the record, and said
            raise BenchError(f"{scenario.name}: ddlrun bench ended with {status}: {errors.strip()[-2000:]}")
        return found


def _run(words: Sequence[str]) -> tuple[int, str]:
    """Run a command; its exit status and errors. When this program is ended, so is the command, which puts all back."""
    with subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
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
