"""Whether the hosts of a job reach each other: each tries short TCP connections to others during the probe.

A refusal is an answer, so nothing has to listen, and if all is well this takes one round trip. The launcher has reached
every host, but hosts may still not reach each other: between two networks without a router, or behind a firewall, MPI
would hang or end with an unclear error.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
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
    """The hosts that do not answer at `port`, and the kernel's reason."""
    found = {}
    poll = select.poll()
    waiting: dict[int, tuple[int, socket.socket]] = {}
    with ExitStack() as opened:
        for at, address in targets.items():
            one = opened.enter_context(socket.socket())
            one.setblocking(False)
            error = one.connect_ex((address, port))
            if error == errno.EINPROGRESS:
                waiting[one.fileno()] = at, one
                poll.register(one, select.POLLOUT)
            elif error in _GAPS:  # known at once: there is no route to it
                found[at] = os.strerror(errno.EHOSTUNREACH if error == errno.EINVAL else error)
        until = time.monotonic() + SECONDS
        while waiting and (left := until - time.monotonic()) > 0:
            for descriptor, _ in poll.poll(left * 1000):
                poll.unregister(descriptor)
                at, one = waiting.pop(descriptor)
                error = one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if error in _GAPS:
                    found[at] = os.strerror(error)
    return found | {at: f"no answer within {SECONDS} s" for at, _ in waiting.values()}
