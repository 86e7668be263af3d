"""`python -m ddl.launch.probe [ADDRESSES]`: print what this host has, as one line of JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from ddl.launch import machine, routes
from ddl.launch.machine import Machine
from ddl.launch.routes import Gap

MARK = "ddl-probe "  # MPI and login scripts print lines of their own
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK")


@dataclass(frozen=True)
class Answer:
    """What a host has, and which other hosts it cannot reach."""

    machine: Machine
    gaps: tuple[Gap, ...] = ()


def line(answer: Answer, rank: int) -> str:
    """The line for the host that is number `rank` in the launcher's list."""
    data = {"rank": rank, "machine": answer.machine.to_dict(), "gaps": [asdict(one) for one in answer.gaps]}
    return MARK + json.dumps(data, separators=(",", ":"))


def parse(text: str) -> dict[int, Answer]:
    """Parse the output of all probes: hosts by their number in the launcher's list. Skips torn lines."""
    found = {}
    for row in text.splitlines():
        _, mark, document = row.partition(MARK)
        if mark:
            with suppress(ValueError, KeyError, TypeError):
                data = json.loads(document)
                gaps = tuple(Gap(**one) for one in data["gaps"])
                found[int(data["rank"])] = Answer(Machine.from_dict(data["machine"]), gaps)
    return found


def main(addresses: Sequence[str] = ()) -> int:
    """Print this host's line. Tries to reach the other hosts at `addresses`, one for each host of the list."""
    # mpirun may have bound this process to a core. Asked for all CPUs, the kernel grants those that the job may use.
    with suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    rank = next((int(os.environ[name]) for name in RANKS if os.environ.get(name, "").isdigit()), 0)
    ports = machine.free_ports()
    found = Answer(
        replace(machine.read(), free_ports=ports), routes.gaps(addresses, rank, ports[0]) if addresses else ()
    )
    # In one write, because the lines of several hosts share one pipe.
    sys.stdout.write(line(found, rank) + "\n")
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1].split(",") if sys.argv[1:] else ()))
