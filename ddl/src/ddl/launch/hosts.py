"""Which hosts a job may use: from the command line, a host file, a batch system's environment, or this host alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ddl.launch import files
from ddl.launch.counts import quoted, whole
from ddl.launch.errors import UsageError

OPERATOR_HOSTFILE = Path("/etc/mpi/hostfile")  # where the Kubernetes MPI Operator mounts it
HOSTFILE_VARIABLES = ("PRTE_MCA_prte_default_hostfile", "OMPI_MCA_orte_default_hostfile", "HYDRA_HOST_FILE")

_EXPECTED = "a file with a host a line"
MOST_HOSTS = 1 << 16
_MOST_NUMBER = 10**12  # in a host's name

_HOST = re.compile(r"(?!.{254})(?!.*[^.]{64})[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")  # at most as long as DNS allows

_IPV6 = re.compile(r"\[.*|[0-9A-Fa-f.]*(:[0-9A-Fa-f.]*){2,}(%.*)?")


@dataclass(frozen=True)
class Host:
    """A host as the user or the batch system calls it; `slots` is None if nobody said how many ranks it may take."""

    name: str
    slots: int | None = None


@dataclass(frozen=True)
class Allocation:
    """Hosts in the order they were listed; `source` says where they are from.

    `asked` says that the slots count ranks; without GPUs they then give the number of ranks. Otherwise (LSF counts
    cores) they are only the most ranks that a host may take.
    """

    hosts: tuple[Host, ...]
    source: str
    asked: bool = True
    batch: str = ""  # "slurm", "lsf" or "operator" if the hosts come from one of these

    @property
    def names(self) -> tuple[str, ...]:
        """The hosts' names, as listed."""
        return tuple(host.name for host in self.hosts)


def allocation(given: str | None, hostfile: Path | None, environ: Mapping[str, str], here: str) -> Allocation:
    """The hosts to use: `given` (-H), else `hostfile`, else Slurm's, LSF's or the MPI Operator's, else `here`.

    Raises UsageError if a name is impossible or a file cannot be read.
    """
    if given is not None:
        return Allocation(parse_hosts(given), f"-H {given}")
    if hostfile is not None:
        text = files.named(hostfile, "-hostfile", _EXPECTED)
        return Allocation(parse_hostfile(text, str(hostfile)), f"-hostfile {hostfile}")
    if nodes := environ.get("SLURM_JOB_NODELIST", environ.get("SLURM_NODELIST", "")):
        return _slurm(nodes, environ)
    if counts := environ.get("LSB_MCPU_HOSTS", ""):
        return _lsf(counts)
    for name in HOSTFILE_VARIABLES:
        if path := environ.get(name, ""):
            found = parse_hostfile(files.named(Path(path), name, _EXPECTED), path)
            return Allocation(found, f"{path}, which {name} names", batch="operator")
    try:
        text = files.read(OPERATOR_HOSTFILE)
    except OSError:
        return Allocation((Host(here),), "this host: no host was named and no batch system shows any")
    return Allocation(
        parse_hostfile(text, str(OPERATOR_HOSTFILE)), f"the Kubernetes MPI Operator's {OPERATOR_HOSTFILE}",
        batch="operator",
    )  # fmt: skip


def parse_hosts(text: str) -> tuple[Host, ...]:
    """`a,b:2,c` as hosts; a repeated name adds its slots, as for mpirun. Raises UsageError."""
    hosts = []
    for word in text.split(","):
        where = f"-H {quoted(text)}"
        name, colon, slots = _parted(word.strip(), where)
        hosts.append(Host(_name(name, where), _slots(slots, where) if colon else None))
    return _merged(hosts)


def parse_hostfile(text: str, path: str) -> tuple[Host, ...]:
    """The hosts of a host file: HOST, HOST:SLOTS (MPICH) or HOST slots=N (Open MPI) a line. Raises UsageError."""
    hosts = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{path}, line {number}"
        name, colon, count = _parted(words[0].rpartition("@")[2], where)
        slots = _slots(count, where) if colon else None
        for word in words[1:]:
            key, equals, value = word.partition("=")
            if key == "slots" and equals:
                slots = _slots(value, where)
            elif key not in ("max_slots", "max-slots", "user"):
                raise UsageError(f"{where}: {quoted(word)} is no setting; expected HOST, HOST:SLOTS or HOST slots=N")
        hosts.append(Host(_name(name, where), slots))
    if not hosts:
        raise UsageError(f"{path}: it names no host; expected a line for each, such as: host1 slots=4")
    return _merged(hosts)


def expand_nodelist(text: str) -> tuple[str, ...]:
    """Slurm's short form of host names: `n[01-03,7],gpu-[1-2]-x` is n01 n02 n03 n7 gpu-1-x gpu-2-x."""
    names: list[str] = []
    for word in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        made = [""]
        for literal, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", word.strip()):
            parts = [literal] if literal else list(_expanded(ranges, text))
            _count(len(names) + len(made) * len(parts), text)
            made = [head + part for head in made for part in parts]
        names += made
    open_bracket = "[" in re.sub(r"\[[^\]]*\]", "", text)
    if not names or open_bracket or not all(_HOST.fullmatch(name) for name in names):
        raise UsageError(f"SLURM_JOB_NODELIST={quoted(text)}: expected hosts, such as n[01-04,7]")
    return tuple(names)


def _count(hosts: int, text: str) -> None:
    """Raises UsageError if a list would have more hosts than a job can have, before the list is made."""
    if hosts > MOST_HOSTS:
        raise UsageError(f"SLURM_JOB_NODELIST={quoted(text)}: more than {MOST_HOSTS:,} hosts; expected at most so many")


def expand_counts(text: str) -> tuple[int, ...]:
    """Slurm's short form of numbers, one a host: `2(x3),1` is 2 2 2 1."""
    counts: list[int] = []
    for word in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", word.strip(), re.ASCII)
        try:
            if not found:
                raise ValueError("expected N or N(xHOSTS)")
            counts += [whole(found[1])] * whole(found[2] or "1", MOST_HOSTS - len(counts))
        except ValueError as error:
            raise UsageError(
                f"SLURM_TASKS_PER_NODE={quoted(text)}: expected numbers, such as 4(x2),1: {error}"
            ) from None
    return tuple(counts)


def _slurm(nodes: str, environ: Mapping[str, str]) -> Allocation:
    names = expand_nodelist(nodes)
    # Slurm says 1 task a node even if nobody asked for a number. Only these two mean that somebody did.
    asked = next((name for name in ("SLURM_NTASKS_PER_NODE", "SLURM_NTASKS") if environ.get(name)), "")
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", "") or environ.get("SLURM_TASKS_PER_NODE", "")
    source = f"Slurm's job {environ.get('SLURM_JOB_ID', '')}".rstrip()
    if not asked or not tasks:
        return Allocation(tuple(map(Host, names)), source, batch="slurm")
    counts = expand_counts(tasks)
    if len(counts) != len(names):
        raise UsageError(
            f"SLURM_TASKS_PER_NODE={quoted(tasks)}: numbers for {len(counts)} hosts, and Slurm lists {len(names)}"
        )
    return Allocation(tuple(map(Host, names, counts)), f"{source}, tasks by {asked}", batch="slurm")


def _lsf(text: str) -> Allocation:
    words = text.split()
    if len(words) % 2 or not words:
        raise UsageError(f"LSB_MCPU_HOSTS={quoted(text)}: expected pairs of a host and a number")
    hosts = _merged(
        Host(_name(name, "LSB_MCPU_HOSTS"), _slots(count, "LSB_MCPU_HOSTS"))
        for name, count in zip(words[::2], words[1::2], strict=True)
    )
    source = "LSF's LSB_MCPU_HOSTS"
    first, rest = hosts[0], hosts[1:]
    if rest and first.slots == 1 and all((host.slots or 0) > 1 for host in rest):
        return Allocation(
            rest, f"{source}, without {first.name}: with its one slot it only starts the job", False, "lsf"
        )
    return Allocation(hosts, source, False, "lsf")


def _expanded(ranges: str, text: str) -> Iterable[str]:
    hosts = 0
    for part in ranges.split(","):
        low, dash, high = part.partition("-")
        try:
            first = whole(low, _MOST_NUMBER, 0)
            last = whole(high, _MOST_NUMBER, first) if dash else first
        except ValueError as error:
            raise UsageError(
                f"SLURM_JOB_NODELIST={quoted(text)}: expected numbers and ranges in brackets, such as [01-04,7]: "
                f"{error}"
            ) from None
        hosts += last - first + 1
        _count(hosts, text)
        for number in range(first, last + 1):
            yield f"{number:0{len(low)}}"


def _parted(word: str, where: str) -> tuple[str, str, str]:
    """`HOST:SLOTS` in parts, as str.partition gives them."""
    if _IPV6.fullmatch(word):
        raise UsageError(
            f"{where}: {quoted(word)} looks like an IPv6 address, and none is accepted; expected names such as host1 "
            "or 10.0.0.1"
        )
    return word.partition(":")


def _name(name: str, where: str) -> str:
    if not _HOST.fullmatch(name):
        raise UsageError(f"{where}: {quoted(name)} is not a host name; expected names such as host1 or 10.0.0.1")
    return name


def _slots(text: str, where: str) -> int:
    try:
        return whole(text)
    except ValueError as error:
        raise UsageError(f"{where}: {quoted(text)} is not a number of slots; {error}") from None


def _merged(hosts: Iterable[Host]) -> tuple[Host, ...]:
    """Each host once. If a host is listed several times, its slots add up; a line without a number counts 1."""
    found: dict[str, list[int | None]] = {}
    for host in hosts:
        found.setdefault(host.name, []).append(host.slots)
    return tuple(
        Host(name, slots[0] if len(slots) == 1 else sum(count or 1 for count in slots)) for name, slots in found.items()
    )
