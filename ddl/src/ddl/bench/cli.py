"""`ddlrun bench`: look at the hosts, start a job for each contestant, time them in turns, print the figures."""

from __future__ import annotations

import json
import os
import platform
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO

import ddl
from ddl.bench import chart, contest, contestants, figures, options
from ddl.bench.contest import LeftOut, Turns
from ddl.bench.contestants import Contestant
from ddl.bench.controller import Controller, CrewError
from ddl.bench.crew import END_SECONDS, Crew, WrongSum, disband
from ddl.launch import arguments, checks, command, folders, mpi, output, process, reach
from ddl.launch.console import say, show, warn
from ddl.launch.decide import Found, Job, decide
from ddl.launch.environment import HIDDEN_PREFIX, SECRET
from ddl.launch.errors import LaunchError, UsageError
from ddl.launch.look import look
from ddl.launch.machine import kernel
from ddl.planning import interface, picture
from ddl.planning.network import Network
from ddl.planning.picture import PictureError


@dataclass(frozen=True)
class Outcome:
    """The contestants, the figures, who was left out, and the error that ended the benchmark ("": none)."""

    entered: tuple[Contestant, ...]
    turns: Sequence[Turns]
    left_out: Sequence[LeftOut]
    said: Sequence[str]  # libddl's lines: what it measured and chose
    error: str


def main(words: Sequence[str]) -> int:
    """Run `ddlrun bench WORDS`; returns the exit status, 1 if a sum was wrong. Raises LaunchError."""
    try:
        asked = options.parse(words)
    except PictureError as error:
        raise UsageError(f"bench: {error}") from None
    if asked is None:
        return 0
    arguments.mask(asked.launch.secrets)
    environ = dict(os.environ)
    found = look(asked.launch, environ)
    checks.tell(found.rows, warn)
    planned = decide(asked.launch, contestants.of_ddl(found.mpi).found(found))
    if asked.launch.verbose:
        for reason in planned.reasons:
            say(": ".join(reason))
    ranks = len(planned.places)
    bound = _bound(asked.network, ranks)
    entered = _entered(asked, planned)
    with process.unwinding(), tempfile.TemporaryDirectory(prefix="ddlrun-bench-") as name:
        outcome = _measure(asked, planned, entered, Path(name), environ)
    errors = [outcome.error, _show(outcome, ranks, bound)]  # each is tried, whatever became of the others
    if asked.json is not None:
        errors.append(_write(asked.json, "--json", lambda path: _keep(path, asked, planned, outcome)))
    if asked.plot is not None and outcome.turns:
        hosts = checks.plural(len(planned.counts), "host")
        drawn = chart.draw(outcome.turns, bound, f"allreduce, float32, {checks.plural(ranks, 'rank')} on {hosts}")
        errors.append(_write(asked.plot, "--plot", lambda path: picture.write(drawn, path)))
    if any(errors):
        raise LaunchError(f"ddlrun bench: {'; '.join(filter(None, errors))}")
    return 1 if any(one.wrong for one in outcome.left_out) else 0


def _bound(described: Network | None, ranks: int) -> figures.Bound | None:
    if described is None:
        return None
    if described.ranks != ranks:
        raise UsageError(f"bench: --network describes {described.ranks} ranks, and there are {ranks}")
    return lambda size: interface.bounds(described.tree, size).cut


def _entered(asked: options.Bench, planned: Job) -> tuple[Contestant, ...]:
    """DDL, and with --compare its peers. Raises CheckError if a worker cannot be made."""
    mpi_here = planned.found.mpi
    ours = contestants.of_ddl(mpi_here)
    if not asked.compare:
        return (ours,)
    others = [mpi.find(path) for path in asked.peer_mpi]

    def wanted(name: str) -> bool:
        return asked.only is None or asked.only.search(name) is not None

    ranks, interfaces = len(planned.places), planned.network.interfaces
    transport = next(str(one.value) for one in planned.exports if one.name == "DDL_TRANSPORT")
    return ours, *contestants.peers(mpi_here, ranks, interfaces, others, wanted, transport=transport)


def _measure(
    asked: options.Bench,
    planned: Job,
    entered: Sequence[Contestant],
    folder: Path,
    environ: Mapping[str, str],
) -> Outcome:
    ranks = len(planned.places)
    where = f"{checks.plural(ranks, 'rank')} on {checks.plural(len(planned.counts), 'host')}"
    say(f"{where}: {', '.join(one.name for one in entered)}")
    tell = _progress()
    crews: list[Crew] = []
    left_out: list[LeftOut] = []
    errors: list[str] = []  # at most one, DDL's

    def leave_out(crew: Crew, size: int | None, error: RuntimeError) -> bool:
        """Leave out a contestant; returns whether the others go on: not without DDL."""
        if crew.name == contestants.DDL:
            errors.append(str(error))
            return False
        crew.close()  # ranks that are there would disturb the others
        left_out.append(LeftOut(crew.name, size, str(error), isinstance(error, WrongSum)))
        tell("")
        warn(f"left out{'' if size is None else ' from here on'}: {error}")
        return True

    with ExitStack() as running:
        folder = running.enter_context(folders.readable(folder))
        addresses = reach.own_addresses(tuple(planned.counts), planned.network.networks)
        controller = Controller(addresses, ranks * len(entered))
        running.callback(controller.close)
        # After an error or a signal, do not wait for a turn to end.
        running.push(lambda kind, *_: disband(crews, END_SECONDS if kind is None else 0.0))
        for at, one in enumerate(entered):  # mpirun takes no folder whose name has a comma or a space
            launch = _launch(one, asked, planned.found, folder / str(at))
            crews.append(Crew(one.name, ranks, controller, _starter(launch, environ), folder / f"{at}.log", one.family))
        ready: list[Crew] = []
        for crew in crews:
            try:
                crew.assemble()
                ready.append(crew)
            except CrewError as error:
                if not leave_out(crew, None, error):
                    return Outcome(tuple(entered), [], left_out, crew.said("ddl"), errors[0])
        controller.close()  # no other rank is expected
        running.callback(tell, "")
        turns = contest.hold(ready, asked.sizes, asked.rounds, asked.seconds, tell, leave_out)
        return Outcome(tuple(entered), turns, left_out, crews[0].said("ddl"), "".join(errors))


def _launch(one: Contestant, asked: options.Bench, found: Found, folder: Path) -> command.Launch:
    launch = command.build(decide(one.options(asked.launch, found.mpi), one.found(found)), folder)
    folder.mkdir()
    launch.write(folder)
    return launch


def _starter(
    launch: command.Launch, environ: Mapping[str, str]
) -> Callable[[Sequence[str], Mapping[str, str], IO[bytes]], subprocess.Popen[bytes]]:
    secret = {f"{HIDDEN_PREFIX}{SECRET}": secrets.token_hex(16)}

    def start(last: Sequence[str], added: Mapping[str, str], output: IO[bytes]) -> subprocess.Popen[bytes]:
        return process.start([*launch.argv, *last], {**environ, **launch.environment, **secret, **added}, output)

    return start


def _progress() -> Callable[[str], None]:
    """Prints a line that the next one overwrites ("" clears it), on a terminal only."""
    if sys.stderr is None or not sys.stderr.isatty():
        return lambda text: None
    return lambda text: print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)


def _show(outcome: Outcome, ranks: int, bound: figures.Bound | None) -> str:
    """Print the figures. Returns why it could not ("": it could)."""
    try:
        if outcome.turns:
            show(figures.table(outcome.turns, ranks, contestants.DDL, bound))
        for one in outcome.left_out:
            show(figures.words(one))
    except LaunchError as error:
        return str(error)
    return ""


def _write(path: Path, option: str, write: Callable[[Path], None]) -> str:
    """Returns why the file could not be written ("": it could)."""
    try:
        write(path)
    except OSError as error:
        return f"{option} {path}: could not be written: {error.strerror}"
    return ""


def _keep(path: Path, asked: options.Bench, planned: Job, outcome: Outcome) -> None:
    record = {
        "what": "allreduce, float32, sum",
        "ranks": len(planned.places),
        "hosts": len(planned.counts),
        "host_names": tuple(planned.counts),
        "network": None if asked.network is None else asked.network.to_dict(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": {
            "system": f"{platform.system()} {kernel()}",
            "processor": platform.machine(),
            "cores": os.cpu_count(),
        },
        "versions": {
            "ddl": ddl.__version__,
            "mpi": str(planned.found.mpi),
            "python": platform.python_version(),
            **{f"MPI of {one.name}": str(one.mpi) for one in outcome.entered if one.mpi != planned.found.mpi},
            **({"torch": _version("torch")} if any(one.name == "gloo" for one in outcome.entered) else {}),
        },
        "ddl": {"mode": str(asked.launch.mode), "dimensions": str(planned.dimensions), "said": outcome.said},
        "rounds": asked.rounds,
        "seconds": asked.seconds,
        "contestants": [
            {"name": one.name, "family": one.family, "mpi": str(one.mpi), "mpiargs": one.mpiargs}
            for one in outcome.entered
        ],
        "turns": figures.to_json(outcome.turns),
        "left_out": [asdict(one) for one in outcome.left_out],
        "error": outcome.error,
    }
    output.write(path, json.dumps(record, indent=1).encode() + b"\n")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"
