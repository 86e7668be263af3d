"""Work on the virtual cluster: `ddlrun bench` or another ddlrun job, between two calibrations of the links.

If the calibrations differ by more than 5%, the machine was busy with other work, and the work is repeated.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "testbed"))

from runs import Goodput, Run  # noqa: E402
from scenarios import Scenario  # noqa: E402

from goodput import measure  # noqa: E402 - of the testbed, which is no package
from testbed import AGENT, Testbed, Topology, cluster, running  # noqa: E402

APART = 0.05  # how much two calibrations may differ
TRIES = 3
SECONDS = 2.0  # of a calibration's window
END_SECONDS = 30  # for `ddlrun bench` to clean up after SIGTERM

T = TypeVar("T")


@dataclass(frozen=True)
class Steady(Generic[T]):
    """The result of work between two calibrations that agree."""

    before: Goodput
    after: Goodput
    result: T
    tries: int


class BenchError(RuntimeError):
    """A ddlrun job failed, or the links were never steady; the message has the job's last words."""


def measured(scenario: Scenario, mpich: Path | None, tell: Callable[[str], None]) -> Run:
    """Run a scenario until its calibrations agree. Raises BenchError."""
    if not scenario.racks:
        return Run(scenario, None, None, (((), _bench(scenario, (), mpich, None)),))

    def work(bed: Testbed) -> list[tuple[tuple[int, ...], dict[str, object]]]:
        records = []
        orders = scenario.orders or (tuple(range(scenario.hosts)),)
        for order in orders * (scenario.rounds if scenario.orders else 1):
            tell(f"hosts {' '.join(map(str, order))}")
            records.append((order, _bench(scenario, order, mpich, bed)))
        return records

    held = steady(scenario.name, scenario.racks, scenario.link, scenario.uplink, work, tell)
    return Run(scenario, held.before, held.after, tuple(held.result), held.tries)


def calibrate(bed: Testbed) -> Goodput:
    """The goodput of a host's link inside its rack, and of an uplink with a flow from each host of a rack."""
    racks = [[host.name for host in rack.hosts] for rack in bed.topology.racks]
    (link,) = measure(bed, [(racks[0][0], racks[0][1])], SECONDS)
    if len(racks) == 1:
        return Goodput(link / 8)
    return Goodput(link / 8, sum(measure(bed, list(zip(racks[0], racks[1], strict=True)), SECONDS)) / 8)


def steady(
    name: str,
    racks: Sequence[int],
    link: str,
    uplink: str,
    work: Callable[[Testbed], T],
    tell: Callable[[str], None],
    *,
    running: Callable[[Topology], AbstractContextManager[Testbed]] = running,
    calibrate: Callable[[Testbed], Goodput] = calibrate,
) -> Steady[T]:
    """Do `work` on a virtual cluster until the calibrations before and after it agree. Raises BenchError.

    `running` makes the cluster, a new one for each try; `calibrate` measures its links.
    """
    for tried in range(1, TRIES + 1):
        with running(cluster(racks, link=link, uplink=uplink if len(racks) > 1 else None)) as bed:
            tell("calibration")
            before = calibrate(bed)
            result = work(bed)
            tell("calibration")
            after = calibrate(bed)
        if before.apart(after) <= APART:
            return Steady(before, after, result, tried)
        tell(f"the links' goodput changed by {before.apart(after):.0%} meanwhile: once more")
    raise BenchError(f"{name}: the links' goodput was never the same within {APART:.0%} before and after")


def ddlrun(
    verb: Sequence[str], ranks: int, words: Sequence[str], bed: Testbed | None, order: Sequence[int] = ()
) -> list[str]:
    """The command `ddlrun VERB` with `words` for `ranks` ranks: on this host, or on all of `bed`'s, in `order`."""
    command = [str(Path(sys.executable).with_name("ddlrun")), *verb, "-np", str(ranks)]
    if bed is None:
        return [*command, *words]
    hosts = ",".join(bed.hosts[at] for at in order or range(len(bed.hosts)))
    # All hosts share the same few cores: a rank that polls without yielding would keep other hosts' ranks from them.
    command += ["-H", hosts, "--mpiarg", "--mca mpi_yield_when_idle 1", *words]
    return bed.command("h0", command, env={"PRTE_MCA_plm_ssh_agent": str(AGENT)}, cwd=ROOT)


def _bench(scenario: Scenario, order: Sequence[int], mpich: Path | None, bed: Testbed | None) -> dict[str, object]:
    with tempfile.TemporaryDirectory(prefix="ddl-bench-", dir=ROOT / "out") as folder:  # the hosts see this one
        record = Path(folder, "record.json")
        words = ["--sizes", scenario.sizes, "--seconds", str(scenario.seconds), "--json", str(record)]
        words += ["--rounds", "1" if scenario.orders else str(scenario.rounds)]
        if scenario.compare:
            words += ["--compare", *(["--peer-mpi", str(mpich)] if mpich else [])]
        status, errors = run(ddlrun(["bench"], scenario.ranks * scenario.hosts, words, bed, order))
        found: dict[str, object] = json.loads(record.read_text()) if record.is_file() else {"error": "it wrote nothing"}
        if found["error"] or (status and not found["left_out"]):  # a peer's wrong sum is in the record and was printed
            raise BenchError(f"{scenario.name}: ddlrun bench ended with {status}: {errors.strip()[-2000:]}")
        return found


def run(words: Sequence[str]) -> tuple[int, str]:
    """Run a command; returns its exit status and errors.

    If this program is ended, it ends the command, which cleans up.
    """
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
