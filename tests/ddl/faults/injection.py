"""Faults injected into jobs that `ddlrun` runs on a virtual cluster, and what became of the jobs.

    python tests/ddl/faults/injection.py --seed 7 --count 200 --json FILE

A fault is drawn (what, when, to whom, on which hosts), the job is started, the fault happens, and then three things
are asked: did ddlrun end in time and not with 0, does its output name whom it happened to, and is any process left on
any host. It needs root: see docs/testbed.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "tests/testbed")] if __name__ == "__main__" else []

from testbed import AGENT, Process, Testbed, TestbedError, cluster, running  # noqa: E402

PROGRAM = ROOT / "tests/ddl/programs/campaign.py"
LIMIT_SECONDS = 10.0  # from the fault, or from the end of DDL_TIMEOUT if that has to pass first, to the end of all
TIMEOUT_SECONDS = 6  # DDL_TIMEOUT of the jobs that wait for it
PATIENT_SECONDS = 60  # and of the others, which may start slowly where two cores have much to do
START_SECONDS = 80.0  # instead, while ddlrun still looks at the hosts and mpirun starts its daemons
HANG_SECONDS = 120.0
LINK, UPLINK = "200mbit", "100mbit"

# The fault that a rank injects into itself, and when: "start" is before ddl.init, "call" before an allreduce, "middle"
# in it.
INSIDE: Mapping[str, Sequence[str]] = {
    "kill": ("start", "call", "middle", "finalize"),
    "terminate": ("start", "call", "middle", "finalize"),
    "abort": ("start", "call", "middle", "finalize"),
    "exit": ("start", "call", "finalize"),
    "leave": ("start", "call", "middle", "finalize"),
    "raise": ("start", "call", "finalize"),
    "stop": ("start", "call", "middle"),
    "never": ("start", "call"),
    "type": ("call",),
    "count": ("call",),
    "operation": ("call",),
    "order": ("call",),
}
# Faults from outside: "start" is a random moment of ddlrun's start, "asleep" while no rank calls ddl.
MOMENTS_OUTSIDE = ("start", "call", "asleep")
OUTSIDE = ("kill host", "cut host", "cut uplink", "kill mpirun", "kill daemon", "kill ddlrun", "terminate ddlrun")
OUTSIDE += ("interrupt ddlrun twice",)
WAITS_FOR_TIMEOUT = ("stop", "never")


@dataclass(frozen=True)
class Fault:
    """The fault, its victim, the moment and the hosts; `racks` holds the number of hosts in each."""

    what: str
    moment: str
    racks: tuple[int, ...]
    each: int  # ranks a host
    victim: int  # a rank, or the number of a host or of a rack
    delay: float  # seconds after the moment

    @property
    def hosts(self) -> int:
        return sum(self.racks)

    @property
    def limit(self) -> float:
        if self.what in OUTSIDE and self.moment == "start":
            return START_SECONDS
        return LIMIT_SECONDS + (TIMEOUT_SECONDS if self.what in WAITS_FOR_TIMEOUT else 0)

    def __str__(self) -> str:
        whom = f"rank {self.victim}"
        if self.what in OUTSIDE:
            whom = f"rack{self.victim}" if self.what == "cut uplink" else f"h{self.victim}"
        shape = "+".join(map(str, self.racks))
        return f"{self.what} ({self.moment}, {whom}, {shape} hosts x {self.each})"


@dataclass
class Outcome:
    """The fate of a job: `problems` is empty if all promises were kept."""

    fault: Fault
    seconds: float = 0.0  # from the fault until ddlrun has ended and no process is left
    status: int | None = None
    left: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    output: str = ""


def draw(seed: int, count: int) -> list[Fault]:
    """`count` faults: each kind at each of its moments as often as possible, the rest by chance."""
    chance = random.Random(seed)
    pairs = [(what, moment) for what, moments in INSIDE.items() for moment in moments]
    pairs += [(what, moment) for what in OUTSIDE for moment in MOMENTS_OUTSIDE]
    faults = []
    while len(faults) < count:
        chance.shuffle(pairs)
        for what, moment in pairs[: count - len(faults)]:
            racks = chance.choice([(2,), (3,), (4,), (1, 1), (2, 1), (2, 2)])
            if what == "cut uplink":
                racks = chance.choice([(1, 1), (2, 1), (2, 2)])
            each = chance.choice([1, 2])
            hosts = sum(racks)
            victim = chance.randrange(hosts * each)
            if what in OUTSIDE:
                # A fault that kills the launcher's own host leaves nothing that could report.
                victim = chance.randrange(1 if what in ("kill host", "kill daemon") else 0, hosts)
            if what == "cut uplink":
                victim = chance.randrange(len(racks))
            faults.append(Fault(what, moment, racks, each, victim, round(chance.uniform(0, 1.5), 2)))
    # Jobs on the same hosts share a testbed; faults that cost it a host come last.
    return sorted(faults, key=lambda one: (one.racks, one.what == "kill host"))


def run(fault: Fault, bed: Testbed, folder: Path, words: Sequence[str] = (), said: int = 1) -> Outcome:
    """Start a job, let the fault happen to it, and see what becomes of it.

    `words` are ddlrun's options and the program, if it is not the campaign's. It must print "now" at the moment,
    `said` times.
    """
    outcome = Outcome(fault)
    inside = fault.what in INSIDE
    slots = ",".join(f"h{at}:{fault.each}" for at in range(fault.hosts))
    what = fault.what if inside else "asleep" if fault.moment == "asleep" else "none"
    if not words:
        words = [sys.executable, str(PROGRAM), what, str(fault.victim), fault.moment if inside else "call"]
    words = [sys.executable, "-m", "ddl.ddlrun", "-H", slots, "--log-dir", str(folder), *words]
    variables = {
        "PYTHONPATH": str(ROOT / "ddl/src"),
        "PRTE_MCA_plm_ssh_agent": str(AGENT),
        "DDL_TIMEOUT": str(TIMEOUT_SECONDS if fault.what in WAITS_FOR_TIMEOUT else PATIENT_SECONDS),
    }
    job = bed.popen("h0", ["sh", "-c", 'exec "$@" 2>&1', "sh", *words], env=variables)
    assert job.stdin is not None
    job.stdin.close()
    lines: list[str] = []
    reached = threading.Event()

    def read() -> None:
        assert job.stdout is not None
        for line in job.stdout:
            lines.append(line)
            if sum(one.strip().endswith("now") for one in lines) >= said:
                reached.set()

    reader = threading.Thread(target=read)
    reader.start()
    cut = None
    try:
        if inside or fault.moment != "start":
            deadline = time.monotonic() + HANG_SECONDS
            while not reached.wait(0.02) and time.monotonic() < deadline and job.poll() is None:
                pass
            if not reached.is_set():
                outcome.problems.append("the job did not come as far as the fault")
        if not inside:
            time.sleep(fault.delay)
            with suppress(TestbedError):  # it cannot reach a host that has just ended
                cut = inflict(fault, bed)
        begin = time.monotonic()
        while job.poll() is None and time.monotonic() - begin < HANG_SECONDS:
            time.sleep(0.01)
        outcome.status = job.poll()
        if outcome.status is None:
            outcome.problems.append(f"hang: ddlrun did not end within {HANG_SECONDS:.0f} s")
        while (left := strangers(bed)) and time.monotonic() - begin < max(fault.limit, 15):
            time.sleep(0.02)
        outcome.seconds = round(time.monotonic() - begin, 2)
        outcome.left = [one.command[:200] for one in left]
    finally:
        if cut:
            bed.mend(cut)
        for one in strangers(bed):
            with suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGKILL)
        job.wait(20)
        reader.join(20)
        for pipe in (job.stdout, job.stderr):
            if pipe:
                pipe.close()
        if cut:
            bed.settle()
    outcome.output = "".join(lines)
    outcome.problems += problems(outcome)
    return outcome


def strangers(bed: Testbed) -> list[Process]:
    """The processes on the hosts, without zombies."""
    return [one for one in bed.processes() if one.command]


def inflict(fault: Fault, bed: Testbed) -> str | None:
    """Do what happens from outside; the link that was cut."""
    host = f"h{fault.victim}"
    if fault.what == "kill host":
        bed.kill(host)
    elif fault.what == "cut host":
        bed.cut(host)
        return host
    elif fault.what == "cut uplink":
        bed.cut(f"rack{fault.victim}")
        return f"rack{fault.victim}"
    elif fault.what == "kill mpirun":
        _signal(bed, "h0", ("mpirun", "prterun", "orterun", "mpiexec"), signal.SIGKILL)
    elif fault.what == "kill daemon":
        _signal(bed, host, ("prted", "orted", "hydra_pmi_proxy"), signal.SIGKILL)
    elif fault.what == "kill ddlrun":
        _signal(bed, "h0", ("-m ddl.ddlrun -H ",), signal.SIGKILL)
    elif fault.what == "terminate ddlrun":
        _signal(bed, "h0", ("-m ddl.ddlrun -H ",), signal.SIGTERM)
    elif fault.what == "interrupt ddlrun twice":
        _signal(bed, "h0", ("-m ddl.ddlrun -H ",), signal.SIGINT)
        time.sleep(0.3)
        _kill(_pids(bed, "h0", ("-m ddl.ddlrun -H ",)), signal.SIGINT)  # the first may have ended it
    return None


def _signal(bed: Testbed, host: str, names: Sequence[str], number: int) -> None:
    """Signal such processes of a host, as soon as there are any."""
    deadline = time.monotonic() + PATIENT_SECONDS
    while not (found := _pids(bed, host, names)):
        if time.monotonic() > deadline:
            raise RuntimeError(f"there is no {names} on {host}")
        time.sleep(0.01)
    _kill(found, number)


def _pids(bed: Testbed, host: str, names: Sequence[str]) -> list[int]:
    """Processes of a host by their program's name, or by the start of its arguments."""
    found = []
    for one in bed.processes(host):
        program, _, rest = one.command.partition(" ")
        if program.rpartition("/")[2] in names or rest.startswith(tuple(names)):
            found.append(one.pid)
    return found


def _kill(pids: Sequence[int], number: int) -> None:
    for pid in reversed(pids):  # the youngest first: a daemon of Open MPI 5 has a parent of its name
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def problems(outcome: Outcome) -> list[str]:
    """The promises that were not kept."""
    fault = outcome.fault
    found = []
    if outcome.left:
        found.append(f"{len(outcome.left)} orphans: {'; '.join(outcome.left)}")
    if outcome.seconds > fault.limit:
        found.append(f"the end took {outcome.seconds} s, and {fault.limit} s are allowed")
    if outcome.status == 0:
        found.append("ddlrun returned 0")
    expected = statuses(fault)
    if expected and outcome.status is not None and outcome.status not in expected:
        found.append(f"ddlrun returned {outcome.status}, expected {' or '.join(map(str, expected))}")
    pattern = named(fault)
    if pattern and not re.search(pattern, outcome.output):
        found.append(f"nothing says {pattern!r}")
    return found


def statuses(fault: Fault) -> tuple[int, ...]:
    """The exit statuses that ddlrun may have; () where only 0 is wrong. A signal may come before it can be caught."""
    rank = {"kill": 137, "terminate": 143, "abort": 134, "exit": 3, "leave": 4, "raise": 1}.get(fault.what)
    early = fault.moment == "start"
    ddlrun = {
        "kill ddlrun": (-9,),
        "terminate ddlrun": (143, *([-15] if early else [])),
        "interrupt ddlrun twice": (130, *([-2] if early else [])),
    }
    return (rank,) if rank is not None else ddlrun.get(fault.what, ())


def named(fault: Fault) -> str:
    """The pattern that ddlrun's output must match: the rank or host of the fault; "" if it cannot be known."""
    rank, host = fault.victim, f"h{fault.victim // fault.each}"
    if fault.what in WAITS_FOR_TIMEOUT and fault.moment == "start":
        return rf"for rank {rank}\b"  # which has not said on which host it is
    if fault.what in INSIDE:
        return rf"rank {rank} (on {host}|\(host {host}[,)])"
    if fault.moment == "start":
        return ""  # it may have happened before there was anything to lose, or after
    if fault.what in ("kill host", "cut host", "kill daemon"):
        # If ddlrun's own host is cut off, it loses the others.
        lost = rf"h[1-{fault.hosts - 1}]" if fault.victim == 0 else f"h{fault.victim}"
        return rf"host {lost}\b.*(lost|does not answer|is gone)|Remote host: +{lost}\b|PeerLost.*host {lost}\b"
    if fault.what == "cut uplink":
        return r"host h\d.*(does not answer|is gone)"
    return ""


def campaign(faults: Sequence[Fault], say: Callable[[str], None]) -> list[Outcome]:
    """Run them all; testbeds are made as they are needed."""
    outcomes = []
    with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="faults-") as made:
        bed, racks = None, None
        for at, fault in enumerate(faults):
            if bed is None or racks != fault.racks or "killed" in bed.state().values():
                stack.pop_all().close()
                bed = stack.enter_context(
                    running(cluster(list(fault.racks), link=LINK, uplink=UPLINK if len(fault.racks) > 1 else None))
                )
                racks = fault.racks
            outcome = run(fault, bed, Path(made))
            outcomes.append(outcome)
            verdict = "; ".join(outcome.problems) or "ok"
            say(f"{at + 1:>4}/{len(faults)}  {fault}: status {outcome.status}, {outcome.seconds:.1f} s: {verdict}")
        stack.pop_all().close()
    return outcomes


def table(outcomes: Sequence[Outcome]) -> str:
    """For each kind: how many, how long until all had ended, and what went wrong."""
    kinds: dict[str, list[Outcome]] = {}
    for one in outcomes:
        kinds.setdefault(one.fault.what, []).append(one)
    rows = ["fault                   number  median s  max s  orphans  hangs  other"]
    for what, ones in [*sorted(kinds.items()), ("all", list(outcomes))]:
        seconds = [one.seconds for one in ones]
        orphans = sum(bool(one.left) for one in ones)
        hangs = sum(one.status is None for one in ones)
        other = sum(bool(one.problems) for one in ones if not one.left and one.status is not None)
        rows.append(
            f"{what:<24}{len(ones):>6}{statistics.median(seconds):>10.1f}{max(seconds):>7.1f}{orphans:>9}{hangs:>7}{other:>7}"
        )
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first", type=int, default=1, help="of the faults that are drawn, the first that happens")
    parser.add_argument("--only", default="", help="faults whose description matches this pattern")
    parser.add_argument("--json", type=Path, help="write the outcomes to this file")
    given = parser.parse_args()
    drawn = draw(given.seed, given.count)[given.first - 1 :]
    faults = [one for one in drawn if re.search(given.only, str(one))]
    print(f"seed {given.seed}, {len(faults)} faults", flush=True)
    outcomes = campaign(faults, lambda line: print(line, flush=True))
    for one in outcomes:
        if one.problems:
            print(f"--- {one.fault}: {one.problems}\n{one.output}")
    print(table(outcomes))
    if given.json:
        given.json.write_text(json.dumps({"seed": given.seed, "outcomes": [asdict(one) for one in outcomes]}, indent=1))
    return any(one.problems for one in outcomes)


if __name__ == "__main__":
    sys.exit(main())
