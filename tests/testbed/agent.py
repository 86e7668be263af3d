#!/usr/bin/env -S python3 -ES
"""A launch agent in place of ssh: `agent.py [SSH OPTIONS] HOST COMMAND...`, from one host of a testbed to another.

Open MPI:  PRTE_MCA_plm_ssh_agent=.../agent.py (5), OMPI_MCA_plm_rsh_agent (4)      MPICH: -launcher-exec .../agent.py
As with ssh, the words of COMMAND go to the login shell as one line, in the home directory, with the environment of a
login there and nothing of the caller's; and 255 is the exit status when the host cannot be reached.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence

from processes import HOST_KINDS, Guard, environment, guard_at, join, keeper, reset_signals, state
from topology import TestbedError

UNREACHABLE = 255

_WITH_VALUE = frozenset("BbcDEeFIiJLlmOopQRSWw")  # ssh's options that take a value


def main(arguments: Sequence[str]) -> int:
    """Become the command on the other host; returns only when that is not possible."""
    try:
        name, words = parse(arguments)
        guard = guard_at(1)  # seen from inside, the guard is process 1
        if guard is None:
            raise TestbedError("this is no host of a testbed; enter one first: python tests/testbed run HOST COMMAND")
        target = keeper(guard, name)
        if gap := gap_between(guard, socket.gethostname(), name):
            raise TestbedError(f"host {name!r} cannot be reached: the link of {gap} is cut")
        login = environment(target)
        join(target, HOST_KINDS)
        os.chdir(login["HOME"])
        reset_signals()
        shell = login["SHELL"]
        os.execve(shell, [shell, "-c", " ".join(words)] if words else [shell], login)
    except (TestbedError, OSError) as error:
        print(f"testbed agent: {error}", file=sys.stderr)
        return UNREACHABLE


def parse(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """The host and the words of the command, from a command line as ssh takes it. Raises TestbedError: no host."""
    words = list(arguments)
    while words and words[0].startswith("-"):
        option = words.pop(0)
        if option == "--":
            break
        # In a cluster of letters the first that takes a value takes what is left of the word, else the next word.
        for place, letter in enumerate(option[1:], start=2):
            if letter in _WITH_VALUE:
                if place == len(option) and words:
                    words.pop(0)
                break
    if not words:
        raise TestbedError("expected HOST COMMAND..., as for ssh, and found no host")
    return words[0].rpartition("@")[2], words[1:]


def gap_between(guard: Guard, here: str, there: str) -> str | None:
    """What is cut on the way from one host to another: a host's or a rack's name; None when the way is free."""
    topology = guard.topology
    way = [here, there]
    if topology.rack_of(here) != topology.rack_of(there):
        way += [topology.rack_of(here).name, topology.rack_of(there).name]
    cut = state(guard)
    return next((name for name in way if name in cut), None) if here != there else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
