"""ddlrun's side of the guards: it finds lost hosts, and ends a job that MPI does not end.

MPI alone is not enough. Open MPI waits for ever for a daemon whose cable was pulled. Hydra lets ranks without MPI go on
after one has failed. And mpirun cannot reach a host that was cut off.
"""

from __future__ import annotations

import errno
import hmac
import secrets
import select
import shlex
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ddl.launch import guard
from ddl.launch.options import START_SECONDS
from ddl.launch.rankfile import Place
from ddl.launch.reception import BACKLOG, Reception
from ddl.launch.reports import Reports, culprit, in_words, judge, named, remedy

# Seconds that MPI, or the ranks, are given to end the job and to say why, before ddlrun does.
SETTLE_SECONDS = 0.3  # after a guard has gone: the reports of its host's ranks may still be on their way
LOST_SECONDS = 1.5  # after a host was lost; its peers find out among themselves at most 2 s later
FAILED_SECONDS = 2.0  # after the first rank has ended with an error
OVER_SECONDS = 3.0  # after the last rank has ended

LOOK_SECONDS = 0.25  # between two looks at which hosts have fallen silent

WARN_SECONDS = 10.0  # without a new host or rank: then the missing ones are named, as libddl does


@dataclass(frozen=True)
class Trouble:
    """Why and when the job must be ended: a sentence for the user, and a time of the monotonic clock."""

    text: str
    due: float


@dataclass
class Progress:
    """The state of a running job, with the times at which it changed. It has no clock: callers pass the time."""

    places: Sequence[Place]
    reports: Reports | None  # None: the ranks cannot report
    start_seconds: float = START_SECONDS  # for the next host or rank to begin
    lost: dict[str, float] = field(default_factory=dict)
    _seen: tuple[int, int, int] = (0, 0, 0)
    _failed_at: float | None = None
    _ending_since: float = float("inf")  # a rank has failed, or MPI has asked one to end
    _moved_at: float = 0.0
    _warned: bool = False  # about this standstill

    def note(self, now: float, guards: int) -> None:
        """Take in the reports again; `guards` is the number of hosts that have answered."""
        reports = self.reports
        seen = (guards, len(reports.began) if reports else 0, len(reports.ended) if reports else 0)
        if seen != self._seen or not self._moved_at:
            self._seen, self._moved_at, self._warned = seen, now, False
        if self._failed_at is None and reports and any(reports.ended.values()):
            self._failed_at = now
        if reports and (reports.asked or self._failed_at is not None):
            self._ending_since = min(self._ending_since, now)

    def trouble(self) -> Trouble | None:
        """Why and when the job must be ended if mpirun does not end first; None if all is well."""
        if self.lost:
            return Trouble("", min(self.lost.values()) + LOST_SECONDS)
        if self.reports is None:
            return None
        hosts = {one.rank: one.host for one in self.places}
        if self._failed_at is not None and (rank := culprit(0, self.reports)) is not None:
            ended = in_words(self.reports.ended[rank])
            host = hosts.get(rank, "?")
            text = f"rank {rank} on {host} ended with {ended}, and mpirun did not end the others; "
            text += remedy(self.reports.ended[rank], host)
            return Trouble(text, self._failed_at + FAILED_SECONDS)
        if self.reports.ended.keys() >= hosts.keys():
            return Trouble("all ranks have ended, and mpirun has not", self._moved_at + OVER_SECONDS)
        if who := self._not_begun():
            text = f"{who[0]} did not begin, and nothing else has for {self.start_seconds:.0f} s; "
            text += f"try: ddlrun doctor -H {who[1]}; or give it more: --start-timeout"
            return Trouble(text, self._moved_at + self.start_seconds)
        return None

    def _not_begun(self) -> tuple[str, str] | None:
        """The ranks and hosts that have not begun, in words, and the hosts as -H takes them; None if all have begun."""
        if self.reports is None:
            return None
        hosts = {one.rank: one.host for one in self.places}
        silent = sorted(hosts.keys() - self.reports.began)
        # If every host's guard has answered, only lines are missing, and that is no reason to end the job.
        if not silent or self._seen[0] >= len(set(hosts.values())):
            return None
        where = dict.fromkeys(hosts[rank] for rank in silent[:8])
        return f"{named(silent)} on {', '.join(where)}", ",".join(where)

    def warning(self, now: float) -> str | None:
        """A sentence about ranks that have not begun, or guards that have not answered, once for each standstill."""
        waited = now - self._moved_at
        if self._warned or waited < min(WARN_SECONDS, self.start_seconds / 2):
            return None
        if self.reports is None or self.lost or self._failed_at is not None:
            return None
        self._warned = True
        if who := self._not_begun():
            return (
                f"warning: {who[0]} did not begin yet, and nothing else has for {waited:.0f} s; the job ends after "
                f"{self.start_seconds:.0f} s (--start-timeout)"
            )
        hosts = len({one.host for one in self.places})
        if (silent := hosts - self._seen[0]) > 0 and not self.reports.ended:
            return (
                f"warning: the guard on {silent} of {hosts} hosts does not reach ddlrun (a firewall?): the loss of "
                "such a host may go unnoticed"
            )
        return None

    def status(self) -> int:
        """The exit status of the rank that made the job fail; 0 if all reported 0; 1 otherwise, or for a lost host."""
        if self.reports is None:
            return 1
        status = judge(0, self.reports, self.places).status
        return min(status, 1) if self.lost and not self.reports.failed else status

    def was_ending(self, moment: float) -> bool:
        """Whether MPI was ending the job at that moment: its daemons end with the job, and this is no lost host."""
        return self._ending_since <= moment

    def has_ended(self, host: str) -> bool:
        """Whether every rank of a host has reported its end; such a host cannot be lost any more."""
        ranks = {one.rank for one in self.places if one.host == host}
        return self.reports is not None and self.reports.ended.keys() >= ranks


class Watch:
    """Listens for the guards of one attempt of a job, and holds their connections."""

    def __init__(
        self,
        places: Sequence[Place],
        addresses: Sequence[str],
        reports: Reports | None,
        say: Callable[[str], None],
        start_seconds: float = START_SECONDS,
        own: str = "",
    ) -> None:
        """`addresses` of this host at which the job's hosts may reach it, best first; empty: all ranks run on it.

        `own` is this host's name among the job's hosts, if it takes part: MPI's daemon there is mpirun itself.
        """
        self._hosts = {one.rank: one.host for one in places}
        self._own = own
        self._reports = reports
        self._say = say
        self._key = secrets.token_hex(16)
        self._mark = secrets.token_hex(8)
        self._progress = Progress(places, reports, start_seconds)
        self._guards: dict[socket.socket, str] = {}  # connections, and the host of each
        self._alone: set[str] = set()  # hosts whose guard said that MPI's daemon did not end in order
        self._gone: dict[str, tuple[float, bool]] = {}  # hosts whose guard is gone: when, and whether silently
        self._seen: set[str] = set()  # hosts that have answered
        self.status = 1  # of the job, after `overdue` said that it must be ended
        self._reception = Reception(addresses, len(set(self._hosts.values())))
        self._contacts = self._reception.contacts

    @property
    def environment(self) -> Mapping[str, str]:
        """The variables that mpirun passes to the ranks."""
        program = [sys.executable, "-I", "-S", str(Path(guard.__file__).absolute()), ",".join(self._contacts)]
        return {guard.COMMAND: f'exec {shlex.join(program)} "$PPID" "$$"', guard.KEY: self._key, guard.MARK: self._mark}

    def sockets(self) -> list[socket.socket]:
        """The sockets on which something may arrive."""
        return [*self._reception.sockets(), *self._guards]

    def receive(self, ready: socket.socket, now: float) -> None:
        """Read from one of them."""
        host = self._guards.get(ready)
        if host is None:
            if came := self._reception.receive(ready, now):
                self._greet(*came)
            return
        try:
            gone, silent = not ready.recv(64), False
            if not gone:
                self._is_alone(host, now)
        except BlockingIOError:
            return
        except OSError as error:
            gone, silent = True, error.errno != errno.ECONNRESET
        if gone:
            self._drop(ready)
            if host not in self._alone:
                self._gone[host] = (now, silent)

    def _is_alone(self, host: str, now: float) -> None:
        """Note a guard's last line. The guard is still there, and ends what is left."""
        if host != self._own:
            self._alone.add(host)
            self._gone[host] = (now, False)

    def overdue(self, now: float) -> str | None:
        """Why the job must be ended now; None if it can go on."""
        self._reception.look(now)
        self._settle(now - SETTLE_SECONDS)
        self._progress.note(now, len(self._seen))
        if warning := self._progress.warning(now):
            self._say(warning)
        trouble = self._progress.trouble()
        if trouble is None or now < trouble.due:
            return None
        self.status = self._progress.status()
        return trouble.text

    @property
    def lost(self) -> tuple[str, ...]:
        """Hosts that had answered and are gone."""
        return tuple(self._progress.lost)

    def end(self) -> None:
        """Tell the guards to end what is left of the job on their hosts; `wait` waits for them."""
        self._take_waiting()
        self._reception.close()
        for connection in list(self._guards):
            try:
                connection.shutdown(socket.SHUT_WR)
            except OSError:
                self._drop(connection)

    def wait(self, seconds: float) -> None:
        """After `end`, wait until each guard has ended its host's processes, at most so long. Prints which did not.

        Hosts that have fallen silent are not waited for: mpirun may have ended before their connections break.
        """
        until = time.monotonic() + seconds
        left = {connection.fileno(): connection for connection in self._guards}
        poll = select.poll()  # select() refuses numbers above 1023
        for descriptor in left:
            poll.register(descriptor, select.POLLIN)
        while time.monotonic() < until and not all(map(guard.has_fallen_silent, left.values())):
            for descriptor, _ in poll.poll(LOOK_SECONDS * 1000):
                silent = False
                try:
                    if left[descriptor].recv(64):
                        self._is_alone(self._guards[left[descriptor]], time.monotonic())
                        continue
                except OSError as error:
                    silent = error.errno != errno.ECONNRESET
                poll.unregister(descriptor)
                connection = left.pop(descriptor)
                if not silent:
                    self._drop(connection)
        for connection, host in list(self._guards.items()):
            self._say(
                f"host {host} ({self._ranks_of(host)}) does not answer: whether its processes have ended is not known; "
                f"look there for those with {guard.MARK}={self._mark} in their environment"
            )
            self._drop(connection)

    def _take_waiting(self) -> None:
        """Accept waiting connections, one in each pass, and read the first lines of guards on them."""
        for _ in range(BACKLOG + 1):  # bounded: strangers may go on connecting
            before = set(self._reception.sockets())
            for connection in self._reception.sockets():
                self.receive(connection, time.monotonic())
            if set(self._reception.sockets()) == before:
                return

    def _greet(self, connection: socket.socket, line: bytes) -> None:
        """Check a guard's first line, `KEY RANK`; close a connection with any other."""
        key, _, rank = line.partition(b" ")
        # The rest of the line is read only if the key is right.
        right = hmac.compare_digest(key, self._key.encode())
        host = self._hosts.get(int(rank)) if right and rank.isdigit() else None
        if host is None:
            connection.close()
            return
        with suppress(OSError):  # it may have ended already
            guard.keep_alive(connection)
        self._guards[connection] = host
        self._seen.add(host)

    def _drop(self, connection: socket.socket) -> None:
        self._guards.pop(connection, None)
        connection.close()

    def settle(self) -> None:
        """When mpirun has ended: print the lost hosts that have not been printed yet."""
        self._settle(float("inf"))

    def _settle(self, before: float) -> None:
        for host, (moment, silent) in list(self._gone.items()):
            if moment > before:
                continue
            del self._gone[host]
            # A guard ends with MPI's daemon, and the daemon ends after a job has failed. Ranks that end slowly then
            # report nothing, because MPI kills them with their shells. If ranks cannot report, a guard's end says
            # nothing.
            in_order = host not in self._alone and self._progress.was_ending(moment)
            if self._progress.has_ended(host) or (not silent and (in_order or self._reports is None)):
                continue
            self._progress.lost[host] = moment
            why = "does not answer any more: it lost its power, or its network"
            if not silent:
                why = "is lost: MPI's daemon there, or the guard of the job, was ended"
            self._say(f"host {host} ({self._ranks_of(host)}) {why}; the job ends; try: ddlrun doctor -H {host}")

    def _ranks_of(self, host: str) -> str:
        return named([rank for rank, name in self._hosts.items() if name == host])
