"""The stages of ddlrun: ask (`options`), look, decide, write, run.

Plain data goes from each stage to the next: Options, Found, Job, Launch, Ended. Only `decide`, with what it calls, and
`command` choose anything, and they are pure; the other stages look at the machine, write files and start processes.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ddl.launch import checks, command, folders, guard, leftovers, process, program, reach, reports
from ddl.launch.checks import Check
from ddl.launch.command import Launch
from ddl.launch.console import echo, say, show, warn
from ddl.launch.decide import Found, Job, decide
from ddl.launch.environment import HIDDEN_PREFIX, SECRET, values
from ddl.launch.errors import CheckError
from ddl.launch.look import look, reach_hosts
from ddl.launch.machine import free_ports
from ddl.launch.options import Export, Options
from ddl.launch.process import Ended
from ddl.launch.reports import Reports
from ddl.launch.watch import Watch

LOST = ("A daemon failed to report back", "lost communication with", "daemon has unexpectedly failed")


def run(asked: Options) -> int:
    """Run the program as `asked`; the exit status of its last attempt. Raises LaunchError if it cannot be started."""
    words, why = program.find(asked.program)
    found = replace(look(asked, dict(os.environ)), program=words)
    checks.tell(found.rows, warn)
    job = decide(asked, found)
    if asked.verbose:
        for reason in (("program", why), *job.reasons):
            say(": ".join(reason))
    folder = folders.name(asked.log_dir)
    if asked.dry_run:
        launch = command.build(job, folder)
        echo(str(launch))
        for name in launch.secrets:
            say(f"{name}: its value is not shown; to run this command yourself, write it in place of {command.MASK}")
        for name, text in launch.files.items():
            show(f"# {folder / name}\n{text.rstrip()}")
        return 0
    for restart in range(1, asked.restarts + 2):
        ended, seconds = _attempt(asked, job, folder)
        if ended.status == 0:
            return 0
        if restart > asked.restarts or ended.asked or ended.interrupted:
            say(f"the program ended with exit status {ended.status} after {seconds:.0f} s; {folder}")
            break
        say(f"the program ended with exit status {ended.status}; restart {restart} of {asked.restarts}")
        try:
            job = _again(asked, job, restart)
        except CheckError as error:
            for line in error.lines:
                say(f"no restart: {line}")
            break
    return ended.status


def doctor(asked: Options) -> int:
    """Run the checks alone and print a table; 0 if none failed, else CheckError's exit status."""
    rows: list[Check] = []
    try:
        found = look(asked, dict(os.environ), rows)
        if not checks.failed(rows):
            planned = ("ranks", "spare hosts", "dimensions", "network", "transport", "DDL")
            rows += [Check(checks.OK, *reason) for reason in decide(asked, found).reasons if reason[0] in planned]
    except CheckError as error:
        rows += [Check(checks.FAILED, subject, text) for subject, text in error.failures]
    show(checks.table(rows))
    return CheckError.exit_status if checks.failed(rows) else 0


def _again(asked: Options, job: Job, restart: int) -> Job:
    """The job for another attempt, with as many ranks; spare hosts replace those that are gone.

    If there are not enough spare hosts, raises CheckError, which names each host that is gone.
    """
    found: Found = job.found
    reached = reach_hosts(asked, found)
    gone = [] if asked.skipchecks else [name for name in job.counts if name not in reached.machines]
    if gone:
        spares = [name for name in job.spares if name in reached.machines]
        if len(spares) < len(gone) or asked.rankfile is not None:
            why = "it is gone, and no spare host is listed"
            first, *others = [
                (f"host {name}", f"{why}: {reached.problems.get(name, '')}".rstrip(": ")) for name in gone
            ]
            raise CheckError(*first, *others)
        say(f"without {', '.join(gone)}; {', '.join(spares[: len(gone)])} instead")
        left = tuple(host for host in found.allocation.hosts if host.name in reached.machines)
        found = replace(found, allocation=replace(found.allocation, hosts=left))
    exports = (*asked.exports, Export("DDL_RESTART", str(restart)))
    asked = replace(asked, ranks=len(job.places), exports=exports)
    return decide(asked, replace(found, machines=reached.machines, ports=free_ports()))


def _attempt(asked: Options, job: Job, folder: Path) -> tuple[Ended, float]:
    """Write the job's files and run it. Returns how it ended, with the job's exit status, and the seconds."""
    with folders.readable(folder) as name:
        launch = command.build(job, name)
        folders.write(folder, launch, job)
        if asked.verbose:
            say(f"log: {folder}")
            echo(str(launch))
        started = time.monotonic()
        environ = job.found.environ
        with leftovers.folder(sum(count for host, count in job.counts.items() if reach.is_here(host))) as scratch:
            ended = _run(asked, job, launch, {**environ, **leftovers.variables(scratch, environ)})
        return ended, time.monotonic() - started


def _run(asked: Options, job: Job, launch: Launch, environ: Mapping[str, str]) -> Ended:
    variables = {**environ, **launch.environment}
    for name in (reports.VARIABLE, reports.SIGNALS_VARIABLE, *guard.VARIABLES):  # of a job that this one is part of
        variables.pop(name, None)
    if not values(job.exports, job.found.environ).get(SECRET):  # else the user's comes with the others
        variables[f"{HIDDEN_PREFIX}{SECRET}"] = secrets.token_hex(16)
    heard = None
    if word := reports.diverted(asked.mpiargs):
        if asked.verbose:
            say(f"exit status: mpirun's own, because the ranks cannot report theirs past its option {word}")
    else:
        variables[reports.VARIABLE] = token = f"ddlrun-{secrets.token_hex(8)}"
        variables[reports.SIGNALS_VARIABLE] = signals_token = f"ddlrun-{secrets.token_hex(8)}"
        heard = Reports(token, signals_token, tagged=asked.rank_prefix or bool(asked.mpiargs))
    hosts = tuple(job.counts)
    addresses = reach.own_addresses(hosts, job.network.networks)
    guards = Watch(job.places, addresses, heard, say, asked.start_timeout, next(filter(reach.is_here, hosts), ""))
    ended = process.run(launch.argv, {**variables, **guards.environment}, heard, guards)
    if ended.asked:
        return ended
    guards.settle()
    return replace(ended, status=_status(job, ended, heard, guards))


def _status(job: Job, ended: Ended, heard: Reports | None, guards: Watch) -> int:
    """The exit status of a job that nobody asked to end. Prints what has not been printed yet."""
    if ended.given_up is not None:
        if ended.given_up:
            say(f"the job is ended: {ended.given_up}")
        for sentence in reports.absent(heard, job.places) if heard else ():
            say(sentence)
        return guards.status
    if guards.lost and not (heard and heard.failed):
        return 1  # Watch has printed why
    if heard is not None:
        verdict = reports.judge(ended.status, heard, job.places, ended.errors)
        for sentence in verdict.said:
            say(sentence)
        return verdict.status
    # Open MPI 5.0.11 returns 0 after a host's daemon is gone, as seen with a killed host.
    if ended.status == 0 and any(words in " ".join(ended.errors.split()) for words in LOST):
        say("mpirun lost a host, and returned 0 all the same: this counts as exit status 1")
        return 1
    return ended.status
