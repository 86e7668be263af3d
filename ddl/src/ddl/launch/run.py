"""What ddlrun does: look, plan, print, launch, and see to the end."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import ddl
from ddl.launch import (
    checks,
    command,
    door,
    environment,
    files,
    folders,
    guard,
    hosts,
    job,
    leftovers,
    mpi,
    process,
    reach,
    reports,
    watch,
)
from ddl.launch.checks import Check
from ddl.launch.command import Launch
from ddl.launch.console import echo, say, show, warn
from ddl.launch.counts import quoted
from ddl.launch.errors import CheckError, UsageError
from ddl.launch.hosts import Allocation
from ddl.launch.job import Found, Job
from ddl.launch.machine import free_port
from ddl.launch.options import Export, Options
from ddl.launch.reach import Reached

LOST = ("A daemon failed to report back", "lost communication with", "daemon has unexpectedly failed")
KEPT_RUNS = 50  # folders of earlier runs
PYTHON_SECONDS = 20  # for a python to say whether it has ddl: its first start may read a cold disk


@dataclass(frozen=True)
class Look:
    """What looking at the hosts gave: what was found, and a row for each check."""

    found: Found
    rows: tuple[Check, ...]


def run(options: Options, environ: Mapping[str, str] | None = None) -> int:
    """Run the program as `options` ask; the exit status of its last attempt.

    Raises LaunchError where it cannot be started.
    """
    environ = dict(os.environ if environ is None else environ)
    words, why = _program(options)
    look = look_at(options, environ)
    _tell(look.rows)
    found = replace(look.found, program=words)
    made = job.plan(options, found)
    if options.verbose:
        for reason in (("program", why), *made.reasons):
            say(": ".join(reason))
    folder = _folder(options.log_dir)
    if options.dry_run:
        launch = command.build(made.request, folder)
        echo(str(launch))
        for name in launch.secrets:
            say(f"{name}: its value is not shown; to run this command yourself, write it in place of {command.MASK}")
        for name, text in launch.files.items():
            show(f"# {folder / name}\n{text.rstrip()}")
        return 0
    attempt = 0
    while True:
        ended, status, seconds = _attempt(folder, made, found, options, environ)
        if status == 0 or attempt == options.restarts or ended.asked:
            if status:
                say(f"the program ended with exit status {status} after {seconds:.0f} s; {folder}")
            return status
        attempt += 1
        say(f"the program ended with exit status {status}; restart {attempt} of {options.restarts}")
        try:
            options, found, made = _again(options, found, made, environ, attempt)
        except CheckError as error:
            for line in error.lines:
                say(f"no restart: {line}")
            return status


def _attempt(
    folder: Path, made: Job, found: Found, options: Options, environ: Mapping[str, str]
) -> tuple[process.Ended, int, float]:
    """Start the job once: how mpirun ended, the exit status that this means, and how many seconds it took."""
    with folders.readable(folder) as name:
        launch = command.build(made.request, name)
        _write(folder, launch, made, found)
        if options.verbose:
            say(f"log: {folder}")
            echo(str(launch))
        started = time.monotonic()
        with leftovers.folder() as scratch:
            ended, status = _launch(launch, made, options, {**environ, **leftovers.variables(scratch, environ)})
        return ended, status, time.monotonic() - started


def _launch(launch: Launch, made: Job, options: Options, environ: Mapping[str, str]) -> tuple[process.Ended, int]:
    """Run mpirun to its end; how it ended, and the exit status that this means (`reports.judge`)."""
    variables = {**environ, **launch.environment}
    for name in (reports.VARIABLE, *guard.VARIABLES):  # of a job that this one is part of
        variables.pop(name, None)
    heard = None
    if word := reports.diverted(options.mpiargs):
        if options.verbose:
            say(f"exit status: mpirun's own, because the ranks cannot report theirs past its option {word}")
    else:
        token = f"ddlrun-{secrets.token_hex(8)}"
        heard = reports.Reports(token, tagged=options.rank_prefix or bool(options.mpiargs))
        variables[reports.VARIABLE] = token
    addresses = reach.own_addresses(made.hosts, made.network.networks)
    own = next(filter(reach.is_here, made.hosts), "")
    guards = watch.Watch(made.places, addresses, heard, say, options.start_timeout, own)
    ended = process.run(launch.argv, {**variables, **guards.environment}, heard, guards)
    if ended.asked:
        return ended, ended.status
    guards.settle()
    if ended.given_up is not None:
        if ended.given_up:
            say(f"the job is ended: {ended.given_up}")
        for sentence in reports.absent(heard, made.places) if heard else ():
            say(sentence)
        return ended, guards.status
    if guards.lost and not (heard and heard.failed):
        return ended, 1  # it has been said
    if heard is not None:
        verdict = reports.judge(ended.status, heard, made.places, ended.errors)
        for sentence in verdict.said:
            say(sentence)
        return ended, verdict.status
    if ended.status == 0 and _lost_a_host(ended.errors):
        say("mpirun lost a host, and returned 0 all the same: this counts as exit status 1")
        return ended, 1
    return ended, ended.status


def doctor(options: Options, environ: Mapping[str, str] | None = None) -> int:
    """Run the checks alone and print a table; 0 where none failed, else what a CheckError's exit status is."""
    environ = dict(os.environ if environ is None else environ)
    rows: list[Check] = []
    try:
        look = look_at(options, environ, rows)
        if checks.failures(look.rows) is None:
            rows += _planned(job.plan(options, look.found))
    except CheckError as error:
        rows += [Check(checks.FAILED, subject, text) for subject, text in error.failures]
    show(checks.table(rows))
    return CheckError.exit_status if checks.failures(rows) else 0


def look_at(options: Options, environ: Mapping[str, str], rows: list[Check] | None = None) -> Look:
    """Find MPI and the hosts, and check them; each check is added to `rows` as soon as it is made.

    Raises CheckError where there is nothing to check without it (mpirun), UsageError for names that cannot be.
    """
    rows = [] if rows is None else rows
    allocation = hosts.allocation(
        given=options.hosts,
        hostfile=options.hostfile,
        environ=environ,
        here=socket.gethostname(),
        read=files.read,
    )
    rows.append(Check(checks.OK, "hosts", f"{checks.plural(len(allocation.hosts), 'host')}: {allocation.source}"))
    found = mpi.find(options.mpirun, path=environ.get("PATH"))
    rows.append(Check(checks.OK, "mpirun", f"{found}, {found.reason}: {found.path}"))
    resolved = reach.addresses(allocation.names)
    if agent_problem := _agent_problem(allocation, found, environ):
        rows.append(Check(checks.FAILED, "ssh", agent_problem))
    reached = _reached(options, allocation, found, resolved, environ)
    machines = reached.machines
    if not options.skipchecks:
        rows += checks.hosts(allocation.names, machines, reached.problems)
        rows += checks.routes(reached.gaps, allocation.names, resolved)
        rows += checks.gpus(machines)
        rows += checks.versions(machines, ddl.__version__)
        asked = (options.ranks, options.accelerators, options.rankfile) != (None, None, None)
        rows += checks.hardware(machines, asked=asked)
    return Look(
        Found(
            mpi=found,
            allocation=allocation,
            machines=machines,
            addresses=resolved,
            environ=environ,
            rankfile=_text(options.rankfile),
            agent=command.agent(environ),
            root=os.geteuid() == 0,
            port=free_port(),
            here=frozenset(filter(reach.is_here, allocation.names)),
            doorkeeper=door.find(),
        ),
        tuple(rows),
    )


@process.unwinding()  # it has files and children
def _reached(
    options: Options, allocation: Allocation, found: mpi.Mpi, resolved: Mapping[str, str], environ: Mapping[str, str]
) -> Reached:
    if options.skipchecks:
        own = reach.here(environment.visible(options.exports, environ))
        return Reached({name: own for name in allocation.names if reach.is_here(name)})
    return reach.probe_hosts(
        found,
        allocation.names,
        resolved,
        environ,
        exports=options.exports,
        more=options.mpiargs,
        seconds=options.start_timeout,
        batch=allocation.batch,
    )


def _agent_problem(allocation: Allocation, found: mpi.Mpi, environ: Mapping[str, str]) -> str:
    """Why no other host can be reached at all; "" where nothing speaks against it."""
    if all(map(reach.is_here, allocation.names)) or allocation.batch == "slurm" or command.agent(environ):
        return ""
    if shutil.which("ssh", path=environ.get("PATH")) or shutil.which("rsh", path=environ.get("PATH")):
        return ""
    return f"none is on PATH, and mpirun reaches hosts with it; install it, or name another in {found.agent_variable}"


def _tell(rows: tuple[Check, ...]) -> None:
    for row in rows:
        if row.state == checks.WARNING:
            warn(str(row))
    if error := checks.failures(rows):
        raise error


def _planned(made: Job) -> Iterator[Check]:
    """Rows of the plan: what `ddlrun` would do with these hosts."""
    for subject, text in made.reasons:
        if subject in ("ranks", "spare hosts", "dimensions", "network", "transport"):
            yield Check(checks.OK, subject, text)


def _program(options: Options) -> tuple[tuple[str, ...], str]:
    def mode(path: str) -> int | None:
        try:
            return os.stat(path).st_mode
        except OSError:
            return None

    words, why = environment.program(options.program, sys.executable, shutil.which, mode)
    if not words:
        raise UsageError(why)
    path = shutil.which(words[0]) if words[0] in ("python", "python3") else None
    if path is not None and not os.path.samefile(Path(path).parent, Path(sys.executable).parent):
        # Where no environment is activated, that is often the system's.
        if version := _version_of_ddl(path):
            return words, f"as given: {path}, which has ddl {version}"
        say(
            f"{words[0]} is taken to be {sys.executable}, which has ddl, and not {path}, which has none; a path is "
            "taken as given"
        )
        words = (sys.executable, *words[1:])
    return words, why


def _version_of_ddl(python: str) -> str:
    """The version of ddl that this python has, with its library; "" if it has none, or does not answer."""
    ask = [python, "-c", "from ddl import __version__, library; library.find(); print(__version__)"]
    status, output, _ = process.capture_plain(ask, os.environ, PYTHON_SECONDS)
    return output.strip() if status == 0 else ""


def _text(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        return files.read(path)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(
            f"-rf={quoted(str(path))}: cannot be read: {why}; expected lines such as: rank 0=host1 slot=0"
        ) from None


def _folder(parent: Path | None) -> Path:
    """Where this run keeps its files: below `parent`, else in the user's folder for state."""
    if parent is None:
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        parent = Path(state, "ddlrun")
    return parent.absolute() / f"{time.strftime('%Y-%m-%d_%H%M%S')}_{os.getpid()}"


def _write(folder: Path, launch: Launch, made: Job, found: Found) -> None:
    """Keep what is run and why, for this user alone: mpirun's files, the command, the reasons, the hosts."""
    files = {
        **launch.files,
        "command": f"{launch}\n",
        "reasons": "".join(f"{subject}: {text}\n" for subject, text in made.reasons),
        "hosts.json": json.dumps({name: one.to_dict() for name, one in found.machines.items()}, indent=1) + "\n",
    }
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        for name, text in files.items():
            aside = folder / f".{name}"
            with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.write(text)
            aside.rename(folder / name)
        for old in sorted(one for one in folder.parent.iterdir() if one.is_dir())[:-KEPT_RUNS]:
            if (old / "rankfile").is_file() and (old / "command").is_file():  # one of ours
                shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise UsageError(
            f"--log-dir={quoted(str(folder.parent))}: {error.strerror}; expected a folder that can be written to"
        ) from None


def _lost_a_host(errors: str) -> bool:
    """Whether mpirun says that a host's daemon is gone: Open MPI 5.0.11 returns 0 then, as seen with a killed host."""
    said = " ".join(errors.split())
    return any(words in said for words in LOST)


def _again(
    options: Options, found: Found, made: Job, environ: Mapping[str, str], attempt: int
) -> tuple[Options, Found, Job]:
    """The job for another attempt, with as many ranks; a host that is gone is replaced by a spare one.

    Raises CheckError where there is none, which says so for each host that is gone.
    """
    allocation = found.allocation
    reached = _reached(options, allocation, found.mpi, found.addresses, environ)
    machines = reached.machines
    gone = [] if options.skipchecks else [name for name in made.hosts if name not in machines]
    if gone:
        spares = [name for name in made.spares if name in machines]
        if len(spares) < len(gone) or options.rankfile is not None:
            why = "it is gone, and no spare host is listed"
            problems = reached.problems
            raise CheckError(*((f"host {name}", f"{why}: {problems.get(name, '')}".rstrip(": ")) for name in gone))
        allocation = replace(allocation, hosts=tuple(host for host in allocation.hosts if host.name in machines))
        say(f"without {', '.join(gone)}; {', '.join(spares[: len(gone)])} instead")
    again = replace(options, ranks=len(made.places), exports=(*options.exports, Export("DDL_RESTART", str(attempt))))
    found = replace(found, allocation=allocation, machines=machines, port=free_port())
    return again, found, job.plan(again, found)
