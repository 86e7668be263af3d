"""Reaching the hosts: one launch of the probe on all of them; where that fails, each is asked alone, to name it."""

from __future__ import annotations

import os
import re
import shlex
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from ddl.launch import command, environment, folders, machine, probe, process
from ddl.launch.command import Request
from ddl.launch.machine import Machine
from ddl.launch.mpi import Mpi
from ddl.launch.network import Network
from ddl.launch.options import START_SECONDS
from ddl.launch.rankfile import Place

ALONE_SECONDS = 20  # for a host that is asked alone
_AT_ONCE = 32
# The probe has no guards; so that Open MPI's daemons notice a cable that is pulled meanwhile, and not after minutes.
_ALERT = {
    f"{prefix}_MCA_oob_tcp_keepalive_{name}": value
    for prefix in ("PRTE", "OMPI")
    for name, value in (("time", "2"), ("intvl", "1"), ("probes", "3"))
}
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=5")


def is_here(name: str) -> bool:
    """Whether a host's name is this host's, as far as names tell."""
    own = socket.gethostname()
    return name in ("localhost", "127.0.0.1", own, own.partition(".")[0]) or own == name.partition(".")[0]


def here() -> Machine:
    """This host."""
    return replace(machine.read(), free_port=machine.free_port())


def addresses(names: Sequence[str]) -> dict[str, str]:
    """The IPv4 address that each name leads to from here; "" where it leads nowhere."""

    def resolve(name: str) -> str:
        try:
            return socket.gethostbyname(name)
        except OSError:
            return ""

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return dict(zip(names, pool.map(resolve, names), strict=True))


def networks_to(found: Sequence[str], own: Machine) -> tuple[str, ...]:
    """Our networks over which the kernel would reach these addresses. Nothing is sent."""
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
    """Where `hosts` find this one, those in `networks` first; () where they are all this one.

    A list, because only they can tell which leads here; the name of this host may lead to 127.0.1.1 (Debian).
    """
    return () if all(map(is_here, hosts)) else outer_addresses(networks)


def outer_addresses(networks: Sequence[str] = ()) -> tuple[str, ...]:
    """This host's IPv4 addresses but for the loopback's: those in `networks` first, then those that lead elsewhere."""
    nics = [nic for nic in here().nics if nic.why != "loopback"]
    nics.sort(key=lambda nic: (nic.network not in networks, not nic.routes))
    return tuple(nic.address for nic in nics)


def probe_hosts(
    mpi: Mpi,
    names: Sequence[str],
    resolved: Mapping[str, str],
    environ: Mapping[str, str],
    more: tuple[str, ...] = (),
    seconds: float = START_SECONDS,
) -> tuple[dict[str, Machine], dict[str, str]]:
    """What each host has, by its name, and what is wrong with those that could not be asked.

    `more` are the user's own arguments of mpirun, `seconds` what it may take. On this host alone nothing is launched.
    """
    if len(names) == 1 and is_here(names[0]):
        return {names[0]: here()}, {}
    networks = networks_to([resolved[name] for name in names if not is_here(name)], here())
    agent = command.agent(environ)
    request = Request(
        mpi=mpi,
        places=tuple(Place(rank, name, 0) for rank, name in enumerate(names)),
        machines={},
        network=Network(networks, (), (), ""),
        program=(sys.executable, "-m", "ddl.launch.probe"),
        exports=environment.exports((), environ, {}),
        bind=False,
        more=more,
        agent=agent,
        root=os.geteuid() == 0,
    )
    with tempfile.TemporaryDirectory(prefix="ddlrun-") as made, folders.readable(Path(made)) as folder:
        launch = command.build(request, folder)
        for name, text in launch.files.items():
            Path(folder, name).write_text(text)
        _, output, errors = process.capture(launch.argv, {**environ, **launch.environment, **_ALERT}, seconds)
    found = {names[rank]: one for rank, one in probe.parse(output).items() if rank < len(names)}
    missing = [name for name in names if name not in found]
    if not missing:
        return found, {}
    machines, problems = _ask_alone(missing, agent, environ)
    if not problems:  # each host answers, so it is mpirun that cannot
        return found, {name: _mpirun_failed(errors) for name in machines}
    return {**found, **machines}, problems


def _ask_alone(
    names: Sequence[str], agent: str, environ: Mapping[str, str]
) -> tuple[dict[str, Machine], dict[str, str]]:
    def ask(name: str) -> Machine | str:
        if is_here(name):
            return here()
        words = [*(shlex.split(agent) or _SSH), name]
        path = [f"PYTHONPATH={environ['PYTHONPATH']}"] if environ.get("PYTHONPATH") else []
        # The agent's words go through a shell on the other side.
        words.append(shlex.join([*(["env", *path] if path else []), sys.executable, "-m", "ddl.launch.probe"]))
        return alone(name, *process.capture_plain(words, environ, ALONE_SECONDS))

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = dict(zip(names, pool.map(ask, names), strict=True))
    return (
        {name: one for name, one in answers.items() if isinstance(one, Machine)},
        {name: one for name, one in answers.items() if isinstance(one, str)},
    )


def alone(name: str, status: int | None, output: str, errors: str) -> Machine | str:
    """A host's answer when it was asked alone: what it has, or a sentence about what is wrong and what to do."""
    if found := probe.parse(output):
        return next(iter(found.values()))
    last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), "it printed nothing")
    try_it = f"; try: ssh {name} true"
    if status is None:
        return f"it did not answer within {ALONE_SECONDS} s{try_it}"
    if "No module named" in errors or re.search(r"No such file or directory: '[^']*/ddl/", last):  # a lost editable one
        return f"{sys.executable} there has no ddl ({last}); install it there: pip install bascule-ddl"
    if status in (126, 127):
        return (
            f"there is no {sys.executable} on it ({last}); install this environment at the same path there, or share it"
        )
    if status == 255:
        return f"it cannot be reached ({last}); check its name, and that you can log in without a password{try_it}"
    return f"the probe failed there with exit status {status} ({last})"


def _mpirun_failed(errors: str) -> str:
    lines = [line.strip() for line in errors.splitlines() if line.strip(" -=\t")]
    said = f": {lines[0]}" if lines else ""
    return (
        "it can be logged in to, but mpirun could not start the probe there; check that MPI is installed at the same "
        f"path, and that no firewall is between the hosts. mpirun said{said or ' nothing'}"
    )
