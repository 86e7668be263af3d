"""`python -m ddl.launch.probe`: print what this host has as one line of JSON. ddlrun starts it once on each host."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from dataclasses import replace

from ddl.launch import machine

MARK = "ddl-probe "  # MPI and login scripts print lines of their own
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")


def line(found: machine.Machine, rank: int) -> str:
    """The line for a host, which the launcher listed at `rank`."""
    return MARK + json.dumps({"rank": rank, "machine": found.to_dict()}, separators=(",", ":"))


def parse(text: str) -> dict[int, machine.Machine]:
    """The hosts by their place in the launcher's list, from all that the probes printed; torn lines are left out."""
    found = {}
    for row in text.splitlines():
        _, mark, document = row.partition(MARK)
        if mark:
            with suppress(ValueError, KeyError, TypeError):
                data = json.loads(document)
                found[int(data["rank"])] = machine.Machine.from_dict(data["machine"])
    return found


def main() -> int:
    """Print this host's line."""
    # mpirun may have bound this process to a core. The kernel keeps from "all CPUs" those that the job may use.
    with suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    rank = next((int(os.environ[name]) for name in RANKS if os.environ.get(name, "").isdigit()), 0)
    found = replace(machine.read(), free_port=machine.free_port())
    # In one write: lines of several hosts meet in one pipe.
    sys.stdout.write(line(found, rank) + "\n")
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
