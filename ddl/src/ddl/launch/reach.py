"""Look: one launch of the probe reaches all hosts; if that fails, each is asked alone, to name the one at fault."""

from __future__ import annotations

import re
import shlex
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from ddl.launch import command, environment, folders, machine, probe, process
from ddl.launch.decide import Found, Job
from ddl.launch.machine import Machine
from ddl.launch.network import Network
from ddl.launch.options import Options
from ddl.launch.rankfile import Place
from ddl.launch.routes import Gap

ALONE_SECONDS = 20  # for a host that is asked alone
REFUSED_SECONDS = 5  # for a host that refuses connections: its sshd may be about to start, as in a new container
_PAUSE = 0.2  # seconds before such a host is asked again
_AT_ONCE = 32
# The probe has no guards. With these settings Open MPI's daemons notice a pulled cable within seconds, not minutes.
_ALERT = {
    f"{prefix}_MCA_oob_tcp_keepalive_{name}": value
    for prefix in ("PRTE", "OMPI")
    for name, value in (("time", "2"), ("intvl", "1"), ("probes", "3"))
}
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5")
_PROBE = (sys.executable, "-m", "ddl.launch.probe")
_CANNOT_START = (
    "it can be logged in to, but mpirun did not start the probe there; check that MPI is installed at the same path, "
    "and that no firewall is between the hosts"
)

_TWICE = "it is the same host as {0}: name each host once, for several ranks with their number, such as {0}:2"


@dataclass(frozen=True)
class Reached:
    """The result of looking at hosts, by name.

    `machines` says what each host has, and `problems` why a host could not be asked. `gaps` lists the hosts that a host
    cannot reach, by their numbers in the list.
    """

    machines: Mapping[str, Machine]
    problems: Mapping[str, str] = field(default_factory=dict)
    gaps: Mapping[str, tuple[Gap, ...]] = field(default_factory=dict)


def is_here(name: str) -> bool:
    """Whether a host name is this host's, judged by the name alone."""
    own = socket.gethostname()
    return name in ("localhost", "127.0.0.1", own, own.partition(".")[0]) or own == name.partition(".")[0]


def here(visible: str | None = None) -> Machine:
    """This host, with the GPUs that `visible` leaves (None: the CUDA_VISIBLE_DEVICES of this process)."""
    return replace(machine.read(visible=visible), free_ports=machine.free_ports())


def addresses(names: Sequence[str]) -> dict[str, str]:
    """The IPv4 address to which each name resolves here; "" if it does not resolve."""

    def resolve(name: str) -> str:
        try:
            return socket.gethostbyname(name)
        except OSError:
            return ""

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return dict(zip(names, pool.map(resolve, names), strict=True))


def networks_to(found: Sequence[str], own: Machine) -> tuple[str, ...]:
    """The networks of this host over which the kernel would reach these addresses. Sends nothing."""
    networks = []
    for address in dict.fromkeys(filter(None, found)):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
            try:
                one.connect((address, 9))
                source = one.getsockname()[0]
            except OSError:
                continue
        networks += [nic.network for nic in own.nics if nic.address == source and nic.network not in networks]
    return tuple(networks)


def own_addresses(hosts: Sequence[str], networks: Sequence[str]) -> tuple[str, ...]:
    """The addresses at which `hosts` reach this one, in `networks` if possible; () if all of them are this one.

    A list, because only the other hosts can tell which address works; this host's own name may resolve to 127.0.1.1
    (Debian).
    """
    return () if all(map(is_here, hosts)) else outer_addresses(networks)


def outer_addresses(networks: Sequence[str] = ()) -> tuple[str, ...]:
    """This host's IPv4 addresses in `networks`; else all but the loopback's, those that lead to other hosts first."""
    nics = [nic for nic in here().nics if nic.why != "loopback"]
    nics.sort(key=lambda nic: not nic.routes)
    return tuple(nic.address for nic in nics if nic.network in networks) or tuple(nic.address for nic in nics)


def probe_hosts(asked: Options, found: Found) -> Reached:
    """Probe each host, again for REFUSED_SECONDS if one refuses. If this is the only host, nothing is launched."""
    begun, spent, limit = time.monotonic(), 0.0, float(asked.start_timeout)
    while True:
        reached, said = _look(asked, found, limit - spent)
        # Only mpirun's words say so if the host has answered since.
        refused = any("Connection refused" in one for one in (said, *reached.problems.values()))
        spent = time.monotonic() - begun + _PAUSE
        if not reached.problems or not refused or spent >= min(REFUSED_SECONDS, limit):
            return reached
        time.sleep(_PAUSE)


def _look(asked: Options, found: Found, seconds: float) -> tuple[Reached, str]:
    """Probe each host once: the result, and all that mpirun printed."""
    names, environ = found.allocation.names, found.environ
    exported = environment.exports(asked.exports, environ, {})
    own = here(environment.visible(asked.exports, environ))
    if len(names) == 1 and is_here(names[0]):
        return Reached({names[0]: own}), ""
    networks = networks_to([found.addresses[name] for name in names if not is_here(name)], own)
    targets = ",".join(_targets(names, found.addresses, networks, own))
    places = tuple(Place(rank, name, 0) for rank, name in enumerate(names))
    job = Job(
        replace(found, program=(*_PROBE, targets)), places, Network(networks, (), (), ""), exported, bind=False,
        more=asked.mpiargs,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="ddlrun-") as made, folders.readable(Path(made)) as folder:
        launch = command.build(job, folder)
        launch.write(folder)
        status, output, errors = process.capture(launch.argv, {**environ, **launch.environment, **_ALERT}, seconds)
    said_by = probe.parse(output)
    answers = {name: said_by[rank] for rank, name in enumerate(names) if rank in said_by}  # in the list's order
    machines = {name: one.machine for name, one in answers.items()}
    gaps = {name: one.gaps for name, one in answers.items() if one.gaps}
    missing = [name for name in names if name not in answers]
    if not missing:
        return Reached(machines, {}, gaps), errors
    agent = found.agent or ("srun" if found.allocation.batch == "slurm" else "")
    alone = _ask_alone(missing, agent, own, environment.values(exported, environ), environ)
    said = mpirun_said(status, errors, seconds)
    if not alone.problems:  # each host answers when asked alone, so mpirun is at fault
        twins = {name: _other_name(name, names, found.addresses) for name in missing}
        problems = {name: _TWICE.format(twin) if twin else f"{_CANNOT_START}. {said}" for name, twin in twins.items()}
        return Reached(machines, problems, gaps), errors
    # mpirun's words may name the cause, if it reaches hosts in another way than we do. Often they repeat the agent's.
    heard = _first_line(errors)
    problems = {
        name: problem if (heard in problem and status is not None) else f"{problem} ({said})"
        for name, problem in alone.problems.items()
    }
    return Reached({**machines, **alone.machines}, problems, gaps), errors


def _other_name(name: str, names: Sequence[str], resolved: Mapping[str, str]) -> str:
    """Another of the names that stands for the same host as `name`; "" if none does."""

    def is_same(other: str) -> bool:
        return (is_here(name) and is_here(other)) or resolved[name] == resolved[other] != ""

    return next((other for other in names if other != name and is_same(other)), "")


def mpirun_said(status: int | None, errors: str, seconds: float) -> str:
    """A sentence about an mpirun that did not start the probe everywhere. `status` is None if it was ended early."""
    line = _first_line(errors)
    said = f"said: {line}" if line else "said nothing"
    if status is None:
        return f"mpirun did not finish within {seconds:.0f} s (--start-timeout), and {said}"
    return f"mpirun {said}"


def _first_line(errors: str) -> str:
    return next((line.strip() for line in errors.splitlines() if line.strip(" -=*\t")), "")


def _targets(names: Sequence[str], resolved: Mapping[str, str], networks: Sequence[str], own: Machine) -> Iterator[str]:
    """The address at which each host is found, as far as this host can tell; "" if it cannot."""
    mine = [nic.address for nic in own.nics if nic.network in networks]
    for name in names:
        if is_here(name):  # its name may resolve to the loopback
            yield mine[0] if len(mine) == 1 else ""
        else:
            yield "" if resolved[name].startswith("127.") else resolved[name]


def _ask_alone(
    names: Sequence[str], agent: str, own: Machine, values: Mapping[str, str], environ: Mapping[str, str]
) -> Reached:
    """Ask each host by itself, with the probe's variables.

    `agent` is the launch agent: "" means ssh, and "srun" means Slurm's.
    """
    kept = [name for name in environment.FORWARDED if name != "PATH" and name in values]
    # Passed by stdin, because every user of a host can read command lines there.
    given = "".join(f"export {name}={shlex.quote(values[name])}\n" for name in kept)
    program = [*(("/bin/sh", "-c", 'eval "$(cat)"; exec "$@"', "sh") if kept else ()), *_PROBE]

    def ask(name: str) -> Machine | str:
        if is_here(name):
            return own
        words, shown = way(name, agent)
        # Agents other than srun pass the words to a shell on the host.
        words += program if agent == "srun" else [shlex.join(program)]
        return alone(name, *process.capture_plain(words, environ, ALONE_SECONDS, given), by=shown)

    pool = ThreadPoolExecutor(_AT_ONCE)
    try:
        answers = dict(zip(names, pool.map(ask, names), strict=True))
    finally:
        # If a signal ends ddlrun (`process.unwinding`), these are ended and not waited for.
        pool.shutdown(wait=False, cancel_futures=True)
    return Reached(
        {name: one for name, one in answers.items() if isinstance(one, Machine)},
        {name: one for name, one in answers.items() if isinstance(one, str)},
    )


def way(name: str, agent: str) -> tuple[list[str], str]:
    """The words before a command that runs on a host, and the same words as a user would type them."""
    if agent == "srun":
        words = ["srun", "--nodes=1", "--ntasks=1", f"--nodelist={name}"]
        return words, shlex.join(words)
    return [*(shlex.split(agent) or _SSH), name], shlex.join([*(shlex.split(agent) or ["ssh"]), name])


def alone(name: str, status: int | None, output: str, errors: str, by: str = "") -> Machine | str:
    """A host's answer when it is asked alone: what it has, or a sentence about the problem and the remedy.

    `by` is how the user can ask it the same way.
    """
    if found := probe.parse(output):
        return next(iter(found.values())).machine
    last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "it printed nothing")
    try_it = f"; try: {by or f'ssh {name}'} true"
    if status is None:
        return f"it did not answer within {ALONE_SECONDS} s{try_it}"
    if "No module named" in errors or re.search(
        r"No such file or directory: '[^']*/ddl/", last
    ):  # or its folder is gone
        return f"{sys.executable} there has no ddl ({last}); install it there, from a copy of the repository (./ddl)"
    if status in (126, 127):
        return (
            f"there is no {sys.executable} on it ({last}); install this environment at the same path there, or share it"
        )
    if last.startswith("srun: "):
        return f"Slurm does not reach it ({last}); see: scontrol show node {name}{try_it}"
    if status == 255:
        return f"it cannot be reached ({last}); check its name, and that you can log in without a password{try_it}"
    return f"the probe failed there with exit status {status} ({last})"
