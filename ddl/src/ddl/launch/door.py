"""Who can connect to the ports of MPI's own programs and libraries.

They listen on every address of a host, also if a job has this host alone, and no option of theirs changes that. So
ddlrun has the library of csrc/doorkeeper/doorkeeper.cc loaded into mpirun, its daemons and, with several hosts, the
ranks. It keeps their ports to the job's networks, and closes connections of other users and those that stay silent.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddl import library

FILE = "libddl_doorkeeper.so"
NETWORKS = "DDL_DOOR"  # those that it lets in
PRELOAD = "LD_PRELOAD"
# A blank or a colon ends a path in LD_PRELOAD; Open MPI cuts its daemon's command at blanks and knows no quotes.
_PLAIN = re.compile(r"[\w./+-]+", re.ASCII)
LOOPBACK = ("127.0.0.0/8", "::1/128")


def find() -> Path | None:
    """The doorkeeper beside libddl; None if it was not built with that one, or LD_PRELOAD cannot name it."""
    for path in library.candidates():
        if path.is_file():
            found = path.resolve().with_name(FILE)
            return found if found.is_file() and _PLAIN.fullmatch(str(found)) else None
    return None


def variables(doorkeeper: Path, networks: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """What loads it into a program: after whatever the user has loaded, because AddressSanitizer must come first."""
    others = ":".join(environ.get(PRELOAD, "").split())
    return {PRELOAD: f"{others}:{doorkeeper}" if others else str(doorkeeper), NETWORKS: ",".join(networks)}


def removal(doorkeeper: Path) -> str:
    """A piece of sh after which a rank has nothing of it; it leaves alone what the user has loaded."""
    return (
        f"LD_PRELOAD=${{LD_PRELOAD%{shlex.quote(str(doorkeeper))}}}; export LD_PRELOAD=${{LD_PRELOAD%:}}; "
        f'[ "$LD_PRELOAD" ] || unset LD_PRELOAD; unset {NETWORKS}; '
    )
