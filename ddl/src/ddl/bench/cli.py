"""What `ddlrun bench` does: look at the hosts, start a job for each contestant, let them take turns, print and keep."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import ddl
from ddl.bench import chart, contest, contestants, figures, options
from ddl.bench.contestants import Contestant
from ddl.bench.crew import Controller, Crew, CrewError
from ddl.launch import checks, command, job, mpi, run
from ddl.launch.console import say, warn
from ddl.launch.errors import CheckError, LaunchError, UsageError
from ddl.launch.job import Found
from ddl.planning import interface, picture
from ddl.planning.network import DescriptionError, Network
from ddl.planning.picture import PictureError


def main(words: Sequence[str]) -> int:
    """Run `ddlrun bench` with `words`; its exit status."""
    try:
        asked = options.parse(words)
    except (DescriptionError, PictureError) as error:
        raise UsageError(f"bench: {error}") from None
    if asked is None:
        return 0
    environ = dict(os.environ)
    look = run.look_at(asked.launch, environ)
    if failed := checks.failures(look.rows):
        raise failed
    ranks = len(job.plan(asked.launch, contestants.of_ddl(look.found.mpi).found(look.found)).places)
    bound = _bound(asked.network, ranks)
    with tempfile.TemporaryDirectory(prefix="ddlrun-bench-") as name:
        turns = _measure(asked, look.found, Path(name), environ)
    print(figures.table(turns, ranks, contestants.DDL, bound))
    if asked.output is not None:
        _keep(asked, look.found, turns, ranks)
    if asked.plot is not None:
        hosts = checks.plural(len(look.found.allocation.hosts), "host")
        picture.write(chart.draw(turns, bound, f"allreduce, float32, {ranks} ranks on {hosts}"), asked.plot)
    return 0


def _bound(described: Network | None, ranks: int) -> figures.Bound | None:
    if described is None:
        return None
    if described.ranks != ranks:
        raise UsageError(f"bench: --network describes {described.ranks} ranks, and there are {ranks}")
    return lambda size: interface.bounds(described.tree, size).cut


def _measure(asked: options.Bench, found: Found, folder: Path, environ: dict[str, str]) -> list[contest.Turns]:
    ours = contestants.of_ddl(found.mpi)
    planned = job.plan(asked.launch, ours.found(found))
    ranks = len(planned.places)
    entered = [ours]
    if asked.compare:
        others = [mpi.find(path) for path in asked.peer_mpis]
        entered += [
            one
            for one in contestants.peers(found.mpi, ranks, planned.network.interfaces, others)
            if asked.only is None or re.search(asked.only, one.name)
        ]
    say(f"{ranks} ranks on {len(planned.hosts)} hosts: {', '.join(one.name for one in entered)}")
    controller = Controller()
    address = controller.address_towards(found.addresses.get(planned.hosts[0]) or "127.0.0.1")
    with ExitStack() as running:
        running.callback(controller.close)
        crews: list[Crew] = []
        for at, one in enumerate(entered):  # mpirun takes no folder whose name has a comma or a space
            launch = _launch(one, asked, found, folder / str(at))

            def start(
                last: Sequence[str], output: IO[bytes], launch: command.Launch = launch
            ) -> subprocess.Popen[bytes]:
                return subprocess.Popen(
                    [*launch.argv, *last],
                    env={**environ, **launch.environment},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )

            crew = Crew(one.name, ranks, controller, address, start, folder / f"{at}.log")
            running.callback(crew.close)
            crews.append(crew)
        entries = []
        for one, crew in zip(entered, crews, strict=True):
            try:
                crew.assemble()
                entries.append(contest.Entry(one.name, crew, one.family))
            except CrewError as error:
                if one is ours:
                    raise LaunchError(f"ddlrun bench: {error}") from None
                crew.close()  # ranks of it may be there, and would disturb the others
                warn(f"left out: {error}")

        def drop(entry: contest.Entry, error: Exception) -> None:
            if entry.name == ours.name:
                raise LaunchError(f"ddlrun bench: {error}") from None
            next(crew for crew in crews if crew is entry.crew).close()
            warn(f"left out from here on: {error}")

        return contest.hold(entries, asked.sizes, asked.rounds, asked.seconds, _progress(), drop)


def _launch(one: Contestant, asked: options.Bench, found: Found, folder: Path) -> command.Launch:
    planned = job.plan(one.options(asked.launch, found.mpi), one.found(found))
    launch = command.build(planned.request, folder)
    folder.mkdir()
    for name, text in launch.files.items():
        (folder / name).write_text(text)
    return launch


def _progress() -> Callable[[str], None]:
    """A line that is written over on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        return lambda text: None
    return lambda text: print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)


def _keep(asked: options.Bench, found: Found, turns: Sequence[contest.Turns], ranks: int) -> None:
    assert asked.output is not None
    record = {
        "what": "allreduce, float32, sum",
        "ranks": ranks,
        "hosts": len(found.allocation.hosts),
        "network": None if asked.network is None else asked.network.to_dict(),
        "date": time.strftime("%Y-%m-%d"),
        "machine": {"system": platform.platform(), "processor": platform.machine(), "cores": os.cpu_count()},
        "versions": {"ddl": ddl.__version__, "mpi": str(found.mpi), "python": platform.python_version()},
        "turns": figures.to_json(turns),
    }
    try:
        asked.output.write_text(json.dumps(record, indent=1) + "\n")
    except OSError as error:
        raise CheckError(f"--json {asked.output}: {error.strerror}; expected a file that can be written") from None
