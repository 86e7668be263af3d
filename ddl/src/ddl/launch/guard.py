"""The guard: one process on each host of a job, by which the host and ddlrun know of each other's end.

The line of `sh` before the first rank of a host starts it (`environment.wrapper`), as a program of its own that needs
the standard library alone. It holds a TCP connection to ddlrun over which nothing passes after its first line, but for
a last one where MPI's daemon did not end in order; `watch` is the other end. When that ends, in order or because
ddlrun, its host or a cable is gone, the guard ends what is left of the job on its host: every process that carries the
job's mark in its environment, and all that those have started; then MPI's daemon. It makes no difference what the
processes are doing, and whether they ever call MPI or ddl again.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

# Open MPI hands variables that begin with OMPI_ to every rank unasked, and hydra all of them; so none of this stands on
# the command line that ddlrun prints. All but MARK are taken from the program's environment before it starts.
COMMAND = "OMPI_DDLRUN_GUARD"  # what a host's first rank runs, as a line of sh
KEY = "OMPI_DDLRUN_KEY"  # by which ddlrun knows its guards
MARK = "OMPI_DDLRUN_JOB"  # by which the guard knows the job's processes
FOLDER = "OMPI_DDLRUN_FOLDER"  # which it holds as long as the job has processes here, if this is ddlrun's host
VARIABLES = (COMMAND, KEY, MARK)

ALONE = b"alone\n"  # MPI's daemon has ended before the rank that it started: somebody else ended it

# The kernel answers probes also for a process that is stopped or starved, so silence means that a host or a link is
# gone. Found 4 to 6 s after that; ranks find it among themselves after 4 to 7 s.
IDLE_SECONDS, PROBE_SECONDS, SILENT_SECONDS = 1, 1, 5

_CONNECT_SECONDS = 5
_ASKED_SECONDS = 1.0  # between asking the processes to end and making them
_DAEMON_SECONDS = 2.0  # for MPI's daemon to end by itself when its ranks have


def main(contacts: Sequence[str], daemon: int, rank: int) -> int:
    """Watch until the connection or MPI's daemon ends, then end the job's processes here.

    `contacts` are HOST:PORT of ddlrun. Where none answers (a firewall, or ddlrun has just ended) the daemon is all that
    there is to watch. `rank` is the shell that started us, a child of the daemon's.
    """
    mark, key = os.environ[MARK], os.environ[KEY]
    os.setsid()  # MPI ends a rank with its whole process group
    os.closerange(3, 256)
    hold_folder(os.environ.get(FOLDER, ""))
    held, started_by, mpirun = _hold(daemon), _hold(rank), _mpirun_of(daemon, mark)
    connection = connect(contacts)
    with suppress(OSError):  # an error is the end, too
        if connection is not None:
            connection.sendall(f"{key} {os.environ['RANK']}\n".encode())
        if held is not None:
            ddlrun = [connection.fileno()] if connection else []
            ended, _, _ = select.select([held, *ddlrun], [], [])
            if held in ended and (started_by is None or _has_ended(started_by)):
                # In order. mpirun may wait for other hosts' ranks; asked to end while it ends by itself, it would die
                # with its last lines unsaid. Where it hangs ddlrun ends it, and the connection.
                if mpirun is not None:
                    select.select([mpirun, *ddlrun], [], [])
            elif connection is not None and held in ended:
                connection.sendall(ALONE)
    end_marked(mark)
    if held is not None:
        end_daemon(held)
    return 0


def hold_folder(folder: str) -> None:
    """Lock the job's folder until this process ends: other runs remove those that nobody has locked (`leftovers`)."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


def _hold(pid: int) -> int | None:
    """A process, by a descriptor: its number may be another's one day. None where it has ended."""
    with suppress(ProcessLookupError):
        return os.pidfd_open(pid) if pid > 1 else None
    return None


def _mpirun_of(daemon: int, mark: str) -> int | None:
    """mpirun, where it runs on this host and is not the daemon itself."""
    fields = _fields(daemon)
    parent = int(fields[1]) if fields else 0
    return _hold(parent) if _has_mark(parent, mark) else None


def _has_ended(held: int, seconds: float = 0) -> bool:
    return bool(select.select([held], [], [], seconds)[0])


def connect(contacts: Sequence[str]) -> socket.socket | None:
    """A connection to the first of the contacts that answers."""
    for contact in contacts:
        host, _, port = contact.rpartition(":")
        try:
            connection = socket.create_connection((host, int(port)), _CONNECT_SECONDS)
        except OSError:
            continue
        connection.settimeout(None)
        keep_alive(connection)
        return connection
    return None


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel find out that the other host, or the way to it, is gone, while nothing is sent."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENT_SECONDS // PROBE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_SECONDS * 1000)


def end_marked(mark: str) -> None:
    """End every process of the job on this host: asked first, then made to."""
    known: dict[int, int] = {}  # and when each began: one that has lost its parent is no descendant of ours any more
    for number, seconds in ((signal.SIGTERM, _ASKED_SECONDS), (signal.SIGKILL, 5.0)):
        told: set[int] = set()
        until = time.monotonic() + seconds
        while left := {pid: began for pid, began in known.items() if _began(pid) == began} | marked(mark):
            known |= left
            for pid in left.keys() - told:
                _send(pid, number)
            told |= left.keys()
            if time.monotonic() > until:
                break
            time.sleep(0.02)


def end_daemon(held: int) -> None:
    """End MPI's daemon, if it does not by itself."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if _has_ended(held, _DAEMON_SECONDS):
            return
        try:
            signal.pidfd_send_signal(held, number)
        except OSError:
            return


def marked(mark: str) -> dict[int, int]:
    """The job's processes on this host but for this one, and when each began.

    They are those with its mark, and those that descend from them: a program may have written over its environment.
    """
    here = _namespace(os.getpid())
    parents: dict[int, int] = {}
    found: set[int] = set()
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        if (fields := _fields(int(name))) is None:
            continue
        parents[int(name)] = int(fields[1])
        if _has_mark(int(name), mark):
            found.add(int(name))
    new = set(found)
    while new:
        new = {pid for pid, parent in parents.items() if parent in new} - found
        found |= new
    # Hosts that are containers of one machine may see each other's processes.
    return {pid: began for pid in found if _namespace(pid) == here and (began := _began(pid))}


def _has_mark(pid: int, mark: str) -> bool:
    """Whether a process was started with the mark."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return f"{MARK}={mark}".encode() in file.read().split(b"\0")
    except OSError:  # it has ended, or is another user's
        return False


def _fields(pid: int) -> list[bytes] | None:
    """What /proc says of a process after its name, from its state on; None where it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the name may hold blanks and brackets
    except OSError:
        return None
    return None if fields[0] in b"ZX" else fields


def _began(pid: int) -> int:
    """When a process began, in ticks of the kernel; 0 where it has ended."""
    fields = _fields(pid)
    return int(fields[19]) if fields else 0


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""


def _send(pid: int, number: int) -> None:
    with suppress(OSError):
        os.kill(pid, number)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1].split(","), int(sys.argv[2]), int(sys.argv[3])))
