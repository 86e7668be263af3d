"""Look: find MPI and the hosts, see what each host has, and check it."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Mapping
from dataclasses import replace

import ddl
from ddl.launch import checks, command, door, environment, files, hosts, mpi, process, reach
from ddl.launch.checks import Check
from ddl.launch.decide import Found
from ddl.launch.machine import free_ports
from ddl.launch.options import Options
from ddl.launch.reach import Reached

_RANKS = "lines such as: rank 0=host1 slot=0"


def look(asked: Options, environ: Mapping[str, str], rows: list[Check] | None = None) -> Found:
    """Find MPI and the hosts, and check them; each check is added to `rows` as soon as it is made.

    Raises CheckError if there is no mpirun, without which nothing can be checked, and UsageError for impossible names.
    """
    rows = [] if rows is None else rows
    allocation = hosts.allocation(asked.hosts, asked.hostfile, environ, socket.gethostname())
    names = allocation.names
    rows.append(Check(checks.OK, "hosts", f"{checks.plural(len(names), 'host')}: {allocation.source}"))
    launcher = mpi.find(asked.mpirun, path=environ.get("PATH"))
    rows.append(Check(checks.OK, "mpirun", f"{launcher}, {launcher.reason}: {launcher.path}"))
    found = Found(
        mpi=launcher,
        allocation=allocation,
        machines={},
        addresses=reach.addresses(names),
        environ=environ,
        rankfile=files.named(asked.rankfile, "-rf", _RANKS) if asked.rankfile else "",
        agent=command.agent(environ),
        root=os.geteuid() == 0,
        ports=free_ports(),
        doorkeeper=door.find(),
    )
    if problem := _agent_problem(found):
        rows.append(Check(checks.FAILED, "ssh", problem))
    reached = reach_hosts(asked, found)
    if not asked.skipchecks:
        rows += checks.hosts(names, reached.machines, reached.problems)
        rows += checks.routes(reached.gaps, names, found.addresses)
        rows += checks.gpus(reached.machines)
        rows += checks.versions(reached.machines, ddl.__version__)
        counted = (asked.ranks, asked.accelerators, asked.rankfile) != (None, None, None)
        rows += checks.hardware(reached.machines, asked=counted)
    here = frozenset(filter(reach.is_here, names))
    return replace(found, machines=reached.machines, here=here, rows=tuple(rows))


@process.unwinding()  # it makes files and starts children
def reach_hosts(asked: Options, found: Found) -> Reached:
    """What each host has; with --skipchecks, only this host is looked at."""
    if asked.skipchecks:
        own = reach.here(environment.visible(asked.exports, found.environ))
        return Reached({name: own for name in found.allocation.names if reach.is_here(name)})
    return reach.probe_hosts(asked, found)


def _agent_problem(found: Found) -> str:
    """Why no other host can be reached at all; "" if there is no such reason."""
    if all(map(reach.is_here, found.allocation.names)) or found.allocation.batch == "slurm" or found.agent:
        return ""
    if any(shutil.which(name, path=found.environ.get("PATH")) for name in ("ssh", "rsh")):
        return ""
    variable = found.mpi.agent_variable
    return f"none is on PATH, and mpirun reaches hosts with it; install it, or name another in {variable}"
