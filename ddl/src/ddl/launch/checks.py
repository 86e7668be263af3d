"""Whether the hosts can run the job. Each check is a row: what was checked, what was found, what to do. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ddl import library
from ddl.launch.errors import CheckError
from ddl.launch.machine import Gpu, Machine
from ddl.launch.routes import Gap

OK, WARNING, FAILED = "ok", "warning", "FAILED"
ROUTES = 8  # pairs of hosts that are named


@dataclass(frozen=True)
class Check:
    """One row. The `text` of a failed check says what was asked, what was found and what to do."""

    state: str
    subject: str
    text: str

    def __str__(self) -> str:
        return f"{self.subject}: {self.text}"


def hosts(names: Sequence[str], machines: Mapping[str, Machine], problems: Mapping[str, str]) -> list[Check]:
    """A row for each host: what it has, or its problem."""
    rows = []
    for name in names:
        if name in machines:
            rows.append(Check(OK, f"host {name}", describe(machines[name])))
        else:
            text = problems.get(name, f"nothing came back from it; try: ssh {name} true")
            rows.append(Check(FAILED, f"host {name}", text))
    return rows


def versions(machines: Mapping[str, Machine], here: str) -> list[Check]:
    """Every host must have the ddl of `here`, because two versions would compare different headers.

    Without the plugin for MPI it gets a warning.
    """
    remedy = f"install version {here} there, from the same copy of the repository: pip install ./ddl"
    other = [
        Check(FAILED, f"host {name}", f"it has ddl {one.ddl}, and this host has {here}; {remedy}")
        for name, one in machines.items()
        if one.ddl != here
    ]
    if other:
        return other
    if lacking := [name for name, one in machines.items() if not one.plugin]:
        text = f"no {library.PLUGIN} on {', '.join(lacking)}: ddl cannot use MPI there (for a fabric, or mode m); "
        text += "install it (conda: libddl-mpi; pip: ./ddl again, with this MPI's mpicxx in PATH)"
        return [Check(WARNING, "ddl", text)]
    return [Check(OK, "ddl", f"version {here} and its plugin for MPI on {_hosts(machines)}")]


def gpus(machines: Mapping[str, Machine]) -> list[Check]:
    """A row for each GPU that cannot be used."""
    return [
        Check(FAILED, f"host {name}", f"{gpu.fault}; fix it, or leave it out with CUDA_VISIBLE_DEVICES or the host")
        for name, one in machines.items()
        for gpu in one.gpus
        if gpu.fault
    ]


def routes(gaps: Mapping[str, Sequence[Gap]], names: Sequence[str], addresses: Mapping[str, str]) -> list[Check]:
    """A row for each pair of hosts, up to ROUTES, that do not reach each other; `gaps` has numbers in the list `names`.

    If ssh's port answers, this is a warning: a firewall may let in ports that MPI is told to use.
    """
    rows: dict[frozenset[str], Check] = {}
    for name in names:
        for gap in gaps.get(name, ()):
            other = names[gap.to]
            there = f"host {other}" + (f" ({addresses[other]})" if addresses.get(other) else "")
            state, text = FAILED, f"no route to {there}: {gap.why}; fix the network between the two, "
            text += "or leave one of them out"
            if gap.filtered:
                state, text = (
                    WARNING,
                    f"{there} answers it at ssh's port alone ({gap.why}); if no other ports are open ",
                )
                text += "between the two, MPI will fail: open more, or have MPI use the open ones, with --mpiarg"
            rows.setdefault(frozenset((name, other)), Check(state, f"host {name}", text))
    return list(rows.values())[:ROUTES]


def hardware(machines: Mapping[str, Machine], *, asked: bool) -> list[Check]:
    """A row for each host that differs from the most common kind.

    Other GPUs are a failure, because the slowest GPU holds up all ranks, unless the user has `asked` for numbers of
    ranks and so knows the hosts. Other processors are a warning.
    """
    if not machines:
        return []
    rows = []
    for what, kinds, state in (
        ("GPUs", {name: _gpus(one.gpus) for name, one in machines.items()}, WARNING if asked else FAILED),
        ("cores", {name: _cores(one) for name, one in machines.items()}, WARNING),
    ):
        common = Counter(kinds.values()).most_common(1)[0][0]
        for name, kind in kinds.items():
            if kind != common:
                text = (
                    f"it has {kind}, and {_named(kinds, common)} {common}; leave it out, or say what you want of its "
                )
                rows.append(Check(state, f"host {name}", f"{text}{what} with -np or --accelerators"))
    return rows or [Check(OK, "hardware", f"the same on {_hosts(machines)}")]


def describe(machine: Machine) -> str:
    """A host in one line."""
    parts = [_cores(machine), _gpus(machine.gpus)]
    if machine.fabrics:
        parts.append(", ".join(machine.fabrics))
    parts += [f"{nic.name} {nic.address}" for nic in machine.nics if nic.routes]
    return ", ".join([*parts, f"ddl {machine.ddl}", f"Python {machine.python}"])


def failed(rows: Iterable[Check]) -> list[tuple[str, str]]:
    """The subjects and texts of the failed checks."""
    return [(row.subject, row.text) for row in rows if row.state == FAILED]


def tell(rows: Sequence[Check], warn: Callable[[str], None]) -> None:
    """Print the warnings. Raises CheckError if a check failed."""
    for row in rows:
        if row.state == WARNING:
            warn(str(row))
    if failures := failed(rows):
        raise CheckError(*failures[0], *failures[1:])


def table(rows: Sequence[Check]) -> str:
    """The rows for people."""
    width = max((len(row.subject) for row in rows), default=0)
    return "\n".join(f"{row.state:<8}  {row.subject:<{width}}  {row.text}" for row in rows)


def plural(count: int, noun: str) -> str:
    """`1 host`, `2 hosts`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _gpus(gpus: Sequence[Gpu]) -> str:
    names = sorted({gpu.name for gpu in gpus})
    return f"{plural(len(gpus), 'GPU')} ({', '.join(names)})" if gpus else "no GPU"


def _cores(machine: Machine) -> str:
    return f"{plural(len(machine.sockets), 'socket')} with {plural(machine.cores, 'core')}"


def _hosts(machines: Mapping[str, Machine]) -> str:
    return next(iter(machines)) if len(machines) == 1 else f"{len(machines)} hosts"


def _named(kinds: Mapping[str, str], common: str) -> str:
    names = [name for name, kind in kinds.items() if kind == common]
    if len(names) == 1:
        return f"{names[0]} has"
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''} have"
