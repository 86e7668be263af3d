"""The guard: a process on each host of a job, so that the host and ddlrun learn of each other's end.

The line of `sh` before the first rank of a host starts it (`environment.wrapper`), as a program of its own that needs
the standard library alone. It holds a TCP connection to ddlrun (`watch`). That rank waits for the connection, so that
ddlrun notices the loss of a host whose ranks have begun. After its first line nothing passes over it, except a last
line if MPI's daemon did not end in order. When the connection ends, in order or because ddlrun, its host or a cable is
gone, the guard ends what is left of the job on its host: every process with the job's mark in its environment, their
descendants, and then MPI's daemon. It does not matter what these processes are doing, or whether they ever call MPI or
ddl again.
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

# Open MPI hands variables that begin with OMPI_ to every rank unasked, and hydra all of them; so these do not appear on
# the command line that ddlrun prints. All but MARK are removed from the program's environment before it starts.
COMMAND = "OMPI_DDLRUN_GUARD"  # a line of sh that the first rank of a host runs
KEY = "OMPI_DDLRUN_KEY"  # ddlrun knows its guards by it
MARK = "OMPI_DDLRUN_JOB"  # the guard knows the job's processes by it
FOLDER = "OMPI_DDLRUN_FOLDER"  # on ddlrun's host: the guard locks it while the job has processes here
VARIABLES = (COMMAND, KEY, MARK)

ALONE = b"alone\n"  # MPI's daemon ended before the rank that it started: somebody else ended it

# The kernel answers probes even for a process that is stopped or starved, so silence means that a host or a link is
# gone. The guard finds out after 4 to 6 s; the ranks find out among themselves after 4 to 7 s.
IDLE_SECONDS, PROBE_SECONDS, SILENT_SECONDS = 1, 1, 5

_CONNECT_SECONDS = 5
_BEGIN_SECONDS = 2.0  # that the rank waits for the connection, from the start of `main`
_ASKED_SECONDS = 1.0  # between SIGTERM and SIGKILL
_DAEMON_SECONDS = 2.0  # for MPI's daemon to end by itself when its ranks have


def main(contacts: Sequence[str], daemon: int, rank: int) -> int:
    """Watch until the connection or MPI's daemon ends, then end the job's processes here.

    `contacts` are HOST:PORT of ddlrun. If none answers (a firewall, or ddlrun has just ended), the guard watches the
    daemon alone. `rank` is the shell that started the guard, a child of the daemon.
    """
    mark, key = os.environ[MARK], os.environ[KEY]
    os.setsid()  # MPI ends a rank with its whole process group
    os.closerange(3, 256)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})  # hydra passes on what ddlrun's caller has blocked
    signal.signal(signal.SIGALRM, _let_the_rank_begin)
    signal.setitimer(signal.ITIMER_REAL, _BEGIN_SECONDS)
    hold_folder(os.environ.get(FOLDER, ""))
    held, started_by, mpirun = _hold(daemon), _hold(rank), _mpirun_of(daemon, mark)
    connection = connect(contacts)
    with suppress(OSError):  # an error counts as the end
        if connection is not None:
            connection.sendall(f"{key} {os.environ['RANK']}\n".encode())
        _let_the_rank_begin()
        if held is not None:
            ddlrun = [connection.fileno()] if connection else []
            ended, _, _ = select.select([held, *ddlrun], [], [])
            if held in ended and (started_by is None or _has_ended(started_by)):
                # The daemon ended in order. mpirun may still wait for the ranks of other hosts; a signal now would kill
                # it before it prints its last lines. If it hangs, ddlrun ends it, and the connection.
                if mpirun is not None:
                    select.select([mpirun, *ddlrun], [], [])
            elif connection is not None and held in ended:
                connection.sendall(ALONE)
    end_marked(mark)
    if held is not None:
        end_daemon(held)
    return 0


def _let_the_rank_begin(*_: object) -> None:
    """End our output, which the shell that started us reads to its end. Our errors go nowhere already."""
    os.dup2(2, 1)


def hold_folder(folder: str) -> None:
    """Lock the job's folder until this process ends: other runs remove folders that are not locked (`leftovers`)."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)


def _hold(pid: int) -> int | None:
    """A descriptor for a process, because its number may be reused. None if the process has ended."""
    with suppress(ProcessLookupError):
        return os.pidfd_open(pid) if pid > 1 else None
    return None


def _mpirun_of(daemon: int, mark: str) -> int | None:
    """A descriptor for mpirun, if it runs on this host and is not the daemon itself."""
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
    """Have the kernel find out that the other host or the link is gone, even if nothing is sent."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENT_SECONDS // PROBE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_SECONDS * 1000)


def has_fallen_silent(connection: socket.socket) -> bool:
    """Whether the other host's kernel has acknowledged nothing for SILENT_SECONDS. It answers probes, too."""
    # Linux's struct tcp_info: eight bytes and twelve words before the milliseconds since the last acknowledgement.
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)
    return int.from_bytes(info[56:60], sys.byteorder) >= SILENT_SECONDS * 1000


def end_marked(mark: str) -> None:
    """End every process of the job on this host: SIGTERM first, then SIGKILL."""
    known: dict[int, int] = {}  # and when each began; an orphan is found by this once it is no descendant any more
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
    """End MPI's daemon, if it does not end by itself."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if _has_ended(held, _DAEMON_SECONDS):
            return
        try:
            signal.pidfd_send_signal(held, number)
        except OSError:
            return


def marked(mark: str) -> dict[int, int]:
    """The job's processes on this host except this one, and when each began.

    They are the processes with its mark and their descendants: a program may have overwritten its environment.
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
    """The fields of /proc/PID/stat after the name, from the state on; None if the process has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()  # the name may hold blanks and brackets
    except OSError:
        return None
    return None if fields[0] in b"ZX" else fields


def _began(pid: int) -> int:
    """When a process began, in ticks of the kernel; 0 if it has ended."""
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
