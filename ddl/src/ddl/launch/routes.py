"""Whether the hosts of a job reach each other: each tries short TCP connections to others during the probe.

A refusal is an answer, so nothing has to listen, and if all is well this takes one round trip. The launcher has reached
every host, but hosts may still not reach each other: between two networks without a router, or behind a firewall, MPI
would hang or end with an unclear error.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

SECONDS = 1.5  # for an answer; a lost packet is sent again after one
MOST = 64  # hosts that a host tries: those after it in the list
SHOWN = 3  # gaps that a host reports
SSH = 22

_GAPS = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ETIMEDOUT, errno.EINVAL, errno.EACCES, errno.EPERM)


@dataclass(frozen=True)
class Gap:
    """A host that did not answer another: its number in the list, and why; `filtered` if ssh's port answers."""

    to: int
    why: str
    filtered: bool


def gaps(addresses: Sequence[str], own: int, port: int) -> tuple[Gap, ...]:
    """The hosts at `addresses` ("": unknown) that this one, number `own`, cannot reach; at most SHOWN.

    `port` stands for the ports that MPI will choose.
    """
    after = [(own + step) % len(addresses) for step in range(1, min(len(addresses), MOST + 1))]
    targets = {at: addresses[at] for at in after if addresses[at] not in ("", addresses[own])}
    silent = _silent(targets, port)
    # For hosts that do not answer, ssh's port tells a firewall from a missing route.
    first = {at: targets[at] for at in list(silent)[:SHOWN]}
    cut = _silent(first, SSH)
    return tuple(Gap(at, silent[at], at not in cut) for at in first)


def _silent(targets: Mapping[int, str], port: int) -> dict[int, str]:
    """The hosts that do not answer at `port`, and why."""

    def gap(address: str) -> str:
        try:
            socket.create_connection((address, port), SECONDS).close()
        except OSError as error:
            if error.errno in _GAPS:
                return os.strerror(errno.EHOSTUNREACH if error.errno == errno.EINVAL else error.errno)
            return f"no answer within {SECONDS} s" if isinstance(error, TimeoutError) else ""
        return ""

    with ThreadPoolExecutor(MOST) as pool:
        found = zip(targets, pool.map(gap, targets.values()), strict=True)
        return {at: why for at, why in found if why}
