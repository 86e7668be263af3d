"""Run: start a job once, and judge its end."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ddl.launch import command, folders, guard, leftovers, process, reach, reports
from ddl.launch.command import Launch
from ddl.launch.console import echo, say
from ddl.launch.decide import Job
from ddl.launch.options import Options
from ddl.launch.process import Ended
from ddl.launch.reports import Reports
from ddl.launch.watch import Watch

LOST = ("A daemon failed to report back", "lost communication with", "daemon has unexpectedly failed")


def attempt(asked: Options, job: Job, folder: Path) -> tuple[Ended, float]:
    """Write the job's files and run it. Returns how it ended, with the job's exit status, and the seconds."""
    with folders.readable(folder) as name:
        launch = command.build(job, name)
        folders.write(folder, launch, job)
        if asked.verbose:
            say(f"log: {folder}")
            echo(str(launch))
        started = time.monotonic()
        environ = job.found.environ
        with leftovers.folder() as scratch:
            ended = _run(asked, job, launch, {**environ, **leftovers.variables(scratch, environ)})
        return ended, time.monotonic() - started


def _run(asked: Options, job: Job, launch: Launch, environ: Mapping[str, str]) -> Ended:
    variables = {**environ, **launch.environment}
    for name in (reports.VARIABLE, *guard.VARIABLES):  # of a job that this one is part of
        variables.pop(name, None)
    heard = None
    if word := reports.diverted(asked.mpiargs):
        if asked.verbose:
            say(f"exit status: mpirun's own, because the ranks cannot report theirs past its option {word}")
    else:
        variables[reports.VARIABLE] = token = f"ddlrun-{secrets.token_hex(8)}"
        heard = Reports(token, tagged=asked.rank_prefix or bool(asked.mpiargs))
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
