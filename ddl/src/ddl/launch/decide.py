"""Decide: ranks, places, dimensions, networks and environment of a job, from Options and Found. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ddl.launch import dimensions, door, environment, guard, layout, network, rankfile
from ddl.launch.checks import Check
from ddl.launch.dimensions import MEASURED_LATER, Dimensions
from ddl.launch.errors import CheckError
from ddl.launch.hosts import Allocation
from ddl.launch.machine import Machine
from ddl.launch.mpi import Mpi
from ddl.launch.network import Network
from ddl.launch.options import MEASURED, Export, Options
from ddl.launch.rankfile import Place


@dataclass(frozen=True)
class Found:
    """Everything that a job depends on beside its options: what was found on this machine and on the hosts."""

    mpi: Mpi
    allocation: Allocation
    machines: Mapping[str, Machine]
    addresses: Mapping[str, str]  # to which the hosts' names resolve here
    environ: Mapping[str, str]
    program: tuple[str, ...] = ()
    rankfile: str = ""  # the text of the user's own
    agent: str = ""  # in place of ssh
    root: bool = False
    ports: tuple[int, ...] = (0, 0)  # free ones, if the first host reported none
    here: frozenset[str] = frozenset()  # names of this host
    doorkeeper: Path | None = None  # the port filter; None: MPI's ports are open to all
    rows: tuple[Check, ...] = ()  # one for each check that was made


@dataclass(frozen=True)
class Job:
    """A job that can be written and run; `reasons` has a subject and a text for each choice."""

    found: Found
    places: tuple[Place, ...]
    network: Network
    exports: tuple[Export, ...] = ()
    dimensions: Dimensions = MEASURED_LATER
    spares: tuple[str, ...] = ()
    bind: bool = True
    fabric: bool = False  # MPI chooses the transports: there is something faster than TCP
    yield_when_idle: bool = False
    rank_prefix: bool = False
    more: tuple[str, ...] = ()  # the user's own arguments for mpirun
    reasons: tuple[tuple[str, str], ...] = ()
    counts: Mapping[str, int] = field(init=False)  # ranks of each host that takes part

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", Counter(one.host for one in self.places))

    @property
    def here(self) -> bool:
        """Whether all ranks are on this host."""
        return self.found.here.issuperset(self.counts)

    @property
    def machines(self) -> dict[str, Machine]:
        """The machines of the hosts that take part, as far as they are known."""
        return {name: self.found.machines[name] for name in self.counts if name in self.found.machines}


def decide(options: Options, found: Found) -> Job:
    """The job. Raises CheckError if what was asked does not fit what was found, UsageError if it cannot be read."""
    places, spares, why = _places(options, found)
    counts = Counter(one.host for one in places)
    shape = dimensions.choose(
        list(counts.values()), mode=options.mode, nodes=options.nodes, racks=options.racks, aisles=options.aisles
    )
    machines = {name: found.machines[name] for name in counts if name in found.machines}
    net = network.choose(list(counts), machines, found.addresses)
    adapters = {name: one.fabrics for name, one in machines.items()}
    fabric = len(counts) > 1 and not options.tcp and len(adapters) == len(counts) and all(adapters.values())
    cores = {name: one.cores for name, one in machines.items()}
    crowded = [name for name, count in counts.items() if count > cores.get(name, count)]
    made, more_reasons = _variables(options, found, shape, net, counts, cores, fabric=fabric)
    reasons = [
        ("hosts", f"{', '.join(found.allocation.names)} ({found.allocation.source})"),
        ("mpirun", f"{found.mpi} ({found.mpi.reason}): {found.mpi.path}"),
        ("ranks", f"{len(places)} ({why})"),
        *([("spare hosts", ", ".join(spares))] if spares else []),
        ("dimensions", f"{shape} ({shape.reason})"),
        ("network", net.reason),
        *(("network", f"without {name}: {why}") for name, why in net.dropped),
        ("transport", _transport(options, fabric, adapters) if len(counts) > 1 else "shared memory: one host"),
        *(("ranks yield while they wait", f"{counts[one]} ranks on {one}'s {cores[one]} cores") for one in crowded[:1]),
        *more_reasons,
    ]
    return Job(
        found,
        places,
        net,
        environment.exports(options.exports, found.environ, made),
        shape,
        spares,
        fabric=fabric,
        yield_when_idle=bool(crowded),
        rank_prefix=options.rank_prefix,
        more=options.mpiargs,
        reasons=tuple(reasons),
    )


def _places(options: Options, found: Found) -> tuple[tuple[Place, ...], tuple[str, ...], str]:
    if options.rankfile is not None:
        places = rankfile.parse(found.rankfile, str(options.rankfile), found.allocation)
        if options.ranks not in (None, len(places)):
            text = f"-np asks for {options.ranks}, and {options.rankfile} places {len(places)}; give one of them"
            raise CheckError("ranks", text)
        return places, (), f"-rf {options.rankfile}"
    chosen = layout.choose(found.allocation, found.machines, ranks=options.ranks, accelerators=options.accelerators)
    places = rankfile.place(chosen.hosts, chosen.counts, found.machines, order=options.order)
    return places, chosen.spares, chosen.reason


def _transport(options: Options, fabric: bool, adapters: Mapping[str, tuple[str, ...]]) -> str:
    if fabric:
        return f"MPI's choice, as every host has a fabric ({', '.join(next(iter(adapters.values())))})"
    if options.tcp:
        return "shared memory and TCP (--tcp)"
    return "shared memory and TCP, as not every host shows a fabric"


def _variables(
    options: Options,
    found: Found,
    shape: Dimensions,
    net: Network,
    counts: Mapping[str, int],
    cores: Mapping[str, int],
    *,
    fabric: bool,
) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """The variables that ddlrun chooses, and the reasons for them."""
    first = next(iter(counts))
    ports = found.machines[first].free_ports if first in found.machines else ()
    port, own_port, *_ = ports or found.ports
    address = net.address or first
    made = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    own = {} if guard.MARK in found.environ else found.environ  # not an outer job's
    given_values = environment.values(options.exports, found.environ)
    networks = net.networks if len(counts) > 1 else door.LOOPBACK
    if len(counts) == 1 and (own.get("DDL_SOCKET_IFNAME") or given_values.get("DDL_SOCKET_IFNAME")):
        networks = ()  # the user has named the interfaces
    if not own.get("DDL_NETWORKS") and (networks or "DDL_NETWORKS" in found.environ):
        made["DDL_NETWORKS"] = ",".join(networks)
    reasons = [("rank 0", f"found at {made['MASTER_ADDR']}:{made['MASTER_PORT']}")]
    if not options.no_ddloptions:
        inherited = environment.inherited_options(found.environ)
        made["DDL_OPTIONS"] = environment.ddl_options(
            options.mode,
            shape,
            options.ddlargs,
            inherited=inherited,
            chosen=options.mode is not MEASURED or any((options.nodes, options.racks, options.aisles)),
            verbose=options.verbose,
        )
        if inherited:
            reasons.append(("DDL_OPTIONS", f"{made['DDL_OPTIONS']} (with those of the environment: {inherited})"))
    made["DDL_TRANSPORT"], why = environment.transport(
        given_values.get("DDL_TRANSPORT") or own.get("DDL_TRANSPORT", ""),
        given_values.get("DDL_OPTIONS") or made.get("DDL_OPTIONS") or found.environ.get("DDL_OPTIONS", ""),
        options.mpiargs,
        fabric=fabric,
        unknown=len(counts) > 1 and not net.networks,
    )
    reasons.append(("DDL", why))
    if made["DDL_TRANSPORT"] == "tcp":
        made["DDL_RENDEZVOUS"] = f"{address}:{own_port}"
    made |= environment.figures(options)
    given = {one.name for one in options.exports}
    each = environment.threads(counts, cores)
    if each is not None and "OMP_NUM_THREADS" not in found.environ and "OMP_NUM_THREADS" not in given:
        made["OMP_NUM_THREADS"] = str(each)
        reasons.append(("OMP_NUM_THREADS", f"{each} (the cores that a rank has for itself)"))
    elif "OMP_NUM_THREADS" in found.environ:
        made["OMP_NUM_THREADS"] = found.environ["OMP_NUM_THREADS"]
    return made, reasons
