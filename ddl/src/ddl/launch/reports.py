"""The reports of the ranks: each says that it began, and with which exit status it ended. Pure.

Open MPI 5.0.11 returns 0, and says nothing, when a host dies. So a job has succeeded only if each of its ranks says so:
the line of `sh` before each program (`environment.wrapper`) writes a line to stderr when the program begins and when it
has ended. Every MPI carries stderr back, through any firewall. ddlrun takes these lines out of it. They carry a token
that is new for each attempt and that no program sees.

A program can write a line, too: that it takes signals (`take_signals`). Its token is another one, which programs see.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddl.launch.rankfile import Place

# Open MPI hands variables that begin with OMPI_ to every rank unasked, and hydra all of them. So the token is not on
# the command line that ddlrun prints, and a copied command reports nothing.
VARIABLE = "OMPI_DDLRUN_TOKEN"
SIGNALS_VARIABLE = "OMPI_DDLRUN_SIGNALS"  # the token of `take_signals`; it stays in the program's environment
TAKES_SIGNALS = "takes signals"
BEGAN = "began"
ASKED = "asked"  # follows the exit status if MPI asked the rank to end
# What a program that takes signals gets instead. MPI forwards these two; for SIGINT and SIGHUP it ends the job.
INSTEAD = {signal.SIGINT: signal.SIGUSR1, signal.SIGHUP: signal.SIGUSR2}

# As MPI writes a rank before a line: "[0]<stderr>: " (Open MPI 5), "[1,0]<stderr>:" (4), "[0] " (hydra); or its start.
_TAG = re.compile(rb"\[[\w.@,-]{0,60}(?:\](?:<[a-z]{0,6}>?)?:? ?)?\Z")
# The rank that mpirun blames, in the words of Open MPI 4 and 5, and a rank that aborted because MPI found an error.
_FIRST = re.compile(r"Process name: \[[^\n]*,(\d+)\]\n\s*Exit code:")
_ABORTED = re.compile(r'process rank (\d+) with PID \d+ on node \S+ calling\s+"abort"')
# A rank that waits in ddl_init, in libddl's words: over MPI each (mpi/launch_mpi.cc); over TCP rank 0 for the others,
# or each of them for rank 0 (startup/tcp_rendezvous.cc).
_WAITS = re.compile(rb"ddl: rank (\d+) \(host [^)\n]*\) has waited [\d.]+ s in (?:MPI_Init|ddl_init):")
_AWAITED = re.compile(rb"ddl_init: rank \d+ has waited [\d.]+ s for ranks? ([\d, ]+)[^:\n]*: not started")
_LONGEST = 32  # bytes after the token in a line
_SHOWN = 8  # ranks and hosts that a message names

# Options of mpirun that lead stderr elsewhere. `--output` of Open MPI 5 has the words as its value.
_DIVERTING = re.compile(
    r"-{1,2}(output-filename|output-directory|merge-stderr-to-stdout|xml|xterm|errfile-pattern|outfile-pattern|errfile)"
    r"(=.*)?|(--output=)?([\w-]+(=[^,]*)?,)*(file|dir|directory|merge(-stderr-to-stdout)?|xml)(=.*|,.*)?"
)


@dataclass(frozen=True)
class Verdict:
    """The exit status of a job, and sentences about it."""

    status: int
    said: tuple[str, ...] = ()


class Reports:
    """Takes the ranks' reports out of what mpirun writes to stderr; everything else passes unchanged, at once.

    `tagged` says that MPI may write a rank before each line. A report is written twice in a row: MPI carries pieces of
    4096 bytes and may put other ranks' pieces between them, but one such cut cannot hit both copies.
    """

    def __init__(self, token: str, signals_token: str = "", *, tagged: bool = False) -> None:
        self.takes_signals = False  # whether the program said so, with `signals_token`
        self.began: set[int] = set()
        self.ended: dict[int, int] = {}  # exit status of each rank, in the order of their ends
        self.asked: set[int] = set()  # ranks that MPI had asked to end
        self.waiting: set[int] = set()  # ranks that said they wait in ddl_init for others
        self.awaited: set[int] = set()  # ranks that were said to be waited for there, the last time
        self._token = token.encode()
        self._takes = f"{signals_token} {TAKES_SIGNALS}".encode() if signals_token else b""
        self._report = re.compile(
            rb"(?:%b (\d{1,9}) (%b|\d{1,3})( %b)?|%b)\n"
            % (re.escape(self._token), BEGAN.encode(), ASKED.encode(), re.escape(self._takes) or rb"(?!)")
        )
        self._tagged = tagged
        self._held = b""
        self._at_line_start = True

    @property
    def failed(self) -> set[int]:
        """Ranks that ended with an error and that MPI had not asked to end."""
        return {rank for rank, ended in self.ended.items() if ended} - self.asked

    def take(self, chunk: bytes) -> bytes:
        """The bytes that go on: `chunk` after those held back, without reports. Holds back the start of a report."""
        data = self._held + chunk
        out = bytearray()
        at = 0
        for found in self._report.finditer(data):
            out += data[at : found.start()]
            at = found.end()
            if found[1]:
                self._note(int(found[1]), found[2].decode(), bool(found[3]))
            else:
                self.takes_signals = True
            self._take_tag(out)
            if self._tagged and self._is_inside_line(out):
                out += b"\n"  # MPI ended the line with the report's end, and that is gone
        rest = data[at:]
        split = len(rest) - self._start_of_report(rest)
        out += rest[:split]
        self._held = self._take_tag(out) + rest[split:]
        if out:
            self._at_line_start = out.endswith(b"\n")
        if b"has waited" in out:  # written in one piece, so it is rarely cut
            self.waiting |= {int(found[1]) for found in _WAITS.finditer(out)}
            for line in _AWAITED.finditer(out):
                self.awaited = {int(rank) for rank in line[1].split(b",") if rank.strip()}
        return bytes(out)

    def rest(self) -> bytes:
        """At the end of the stream: the bytes that were held back."""
        rest, self._held = self._held, b""
        return rest

    def _note(self, rank: int, word: str, asked: bool) -> None:
        self.began.add(rank)
        if word != BEGAN and rank not in self.ended:
            self.ended[rank] = int(word)
            if asked:
                self.asked.add(rank)

    def _start_of_report(self, data: bytes) -> int:
        """The number of bytes at the end that may be the start of a report."""
        at = data.rfind(self._token)
        if at >= 0:
            after = data[at + len(self._token) :]
            if b"\n" not in after and len(after) < _LONGEST:
                return len(data) - at
        starts = {sign[:size] for sign in (self._token, self._takes) for size in range(1, len(sign) + 1)}
        return max((len(start) for start in starts if data.endswith(start)), default=0)

    def _take_tag(self, out: bytearray) -> bytes:
        """Cut a tag, or the start of one, from the end of `out`; returns it."""
        found = _TAG.search(out) if self._tagged else None
        if found is None:
            return b""
        tag = bytes(found[0])
        del out[found.start() :]
        return tag

    def _is_inside_line(self, out: bytearray) -> bool:
        return not out.endswith(b"\n") if out else not self._at_line_start


def take_signals() -> None:
    """For a program: say that it has handlers for SIGUSR1 and SIGUSR2. Rank 0 calls it when every rank has them.

    From then on, SIGINT (Ctrl-C) and SIGHUP to ddlrun do not end the job: ddlrun sends the ranks SIGUSR1 and SIGUSR2.
    SIGQUIT and SIGTERM still end it. Does nothing if ddlrun did not start this process.
    """
    if token := os.environ.get(SIGNALS_VARIABLE):
        os.write(2, f"{token} {TAKES_SIGNALS}\n".encode() * 2)


def diverted(arguments: Sequence[str]) -> str:
    """The user's argument of mpirun that keeps the ranks' stderr from ddlrun; "" if none does."""
    return next((word for word in arguments if _DIVERTING.fullmatch(word)), "")


def culprit(status: int, reports: Reports, errors: str = "") -> int | None:
    """The rank that made a job fail; None if no rank reported an error. `errors` is mpirun's stderr.

    The other ranks were ended for it, or got an error because of it. So ranks that MPI asked to end count least, and
    ranks that aborted over a broken connection count little. A rank that a signal ended comes before one that returned
    an error. Then come the rank that mpirun blames, one whose status mpirun returned, and the first to report.
    """
    failed = {rank: ended for rank, ended in reports.ended.items() if ended}
    if not failed:
        return None
    named_by_mpi = [int(found[1]) for found in _FIRST.finditer(errors)]
    aborted = {int(found[1]) for found in _ABORTED.finditer(errors)}

    def order(rank: int) -> tuple[bool, bool, bool, bool, bool]:
        ended = failed[rank]
        return rank in reports.asked, rank in aborted, ended <= 128, rank not in named_by_mpi, ended != status

    return min(failed, key=order)


def judge(status: int, reports: Reports, places: Sequence[Place], errors: str = "") -> Verdict:
    """The job's exit status: that of the rank that made it fail; 0 if every rank reported 0; else mpirun's.

    If all ranks ended well, and none was asked to end, mpirun's own status says nothing about the program. Open MPI
    5.0.11 sometimes returns 1, without a word, when its daemons end in an unusual order.
    """
    hosts = {one.rank: one.host for one in places}
    rank = culprit(status, reports, errors)
    if rank is not None:
        host = hosts.get(rank, "?")
        said = f"rank {rank} on {host} ended with {in_words(reports.ended[rank])}"
        said += "" if status else ", and mpirun returned 0 all the same"
        said += f"; {remedy(reports.ended[rank], host)}"
        return Verdict(reports.ended[rank], (said, *absent(reports, places)))
    silent = _silent(reports, hosts)
    if not silent and not (status and reports.asked):
        said = f"every rank ended with exit status 0, so the job succeeded; mpirun itself ended with {in_words(status)}"
        return Verdict(0, (said,) if status else ())
    if status:
        said = f"mpirun itself ended with {in_words(status)}, and no rank has reported an error; see its words above"
        return Verdict(status, (said, *silent))
    count = len(hosts.keys() - reports.ended.keys())
    said = f"mpirun returned 0, and {count} of {len(hosts)} ranks did not report their end: this counts as a failure"
    return Verdict(1, (said, *silent))


def _silent(reports: Reports, hosts: Mapping[int, str]) -> list[str]:
    """A sentence for each host on which some rank did not report its end."""
    silent: dict[str, list[int]] = {}
    for rank in sorted(hosts.keys() - reports.ended.keys()):
        silent.setdefault(hosts[rank], []).append(rank)
    lines = []
    for host, ranks in list(silent.items())[:_SHOWN]:
        began = "began, and nothing came after it" if reports.began.intersection(ranks) else "did not begin"
        lines.append(f"host {host}: {named(ranks)} {began}")
    if len(silent) > _SHOWN:
        lines.append(f"and {len(silent) - _SHOWN} more hosts")
    if lines and len(set(hosts.values())) > 1:
        every = ",".join(dict.fromkeys(hosts.values()))
        lines.append(f"when a host is lost, mpirun abandons the others, too; find it with: ddlrun doctor -H {every}")
    return lines


def absent(reports: Reports, places: Sequence[Place]) -> tuple[str, ...]:
    """A sentence about the ranks that the others waited for in ddl_init: libddl does not know their hosts."""
    waiting, awaited = reports.waiting, reports.awaited
    missing = [one for one in places if one.rank in awaited or (waiting and one.rank not in waiting)]
    if not missing:
        return ()
    where = ", ".join(dict.fromkeys(one.host for one in missing[:_SHOWN]))
    how = "came late to ddl_init, or not at all" if awaited else "did not wait in ddl_init, as the others did"
    return (f"{named([one.rank for one in missing])} on {where} {how}",)


def in_words(ended: int) -> str:
    """An exit status, and the signal that it may mean. mpirun's own errors have the numbers of real-time signals."""
    return f"exit status {ended}" + (f" (signal {ended - 128})" if 128 < ended < 128 + 32 else "")


def remedy(ended: int, host: str) -> str:
    """Advice on finding out why a rank on `host` ended."""
    if ended == 128 + 9:
        return f"if nobody killed it, the kernel did, because memory ran out: see dmesg on {host}"
    return "see what it wrote above; --rank-prefix puts the rank before each line"


def named(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 3, 4`, or the first of many."""
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_SHOWN]))}{more}"
