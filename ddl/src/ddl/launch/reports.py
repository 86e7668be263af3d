"""What each rank reports of itself: that it began, and with which exit status it ended. Pure.

Open MPI 5.0.11 returns 0, and says nothing, when a host dies. So a job has succeeded only when each of its ranks says
that it has: the line of `sh` before each program (`environment.wrapper`) writes a line to stderr when the program
begins and when it has ended. Stderr is the one way back from a rank that every MPI has and that no firewall closes;
ddlrun takes these lines out of it. They carry a token that is new for each start of the job and that no program sees.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddl.launch.rankfile import Place

# Open MPI hands variables that begin with OMPI_ to every rank unasked, and hydra all of them. So the token is not on
# the command line that ddlrun prints, and a copy of that line reports nothing.
VARIABLE = "OMPI_DDLRUN_TOKEN"
BEGAN = "began"

# As MPI writes a rank before a line: "[0]<stderr>: " (Open MPI 5), "[1,0]<stderr>:" (4), "[0] " (hydra); or its start.
_TAG = re.compile(rb"\[[\w.@,-]{0,60}(?:\](?:<[a-z]{0,6}>?)?:? ?)?\Z")
_LONGEST = 32  # what follows the token in a line
_SHOWN = 8  # ranks and hosts that a message names

# Options of mpirun that lead stderr past us. `--output` of Open MPI 5 has the words as its value.
_DIVERTING = re.compile(
    r"-{1,2}(output-filename|output-directory|merge-stderr-to-stdout|xml|xterm|errfile-pattern|outfile-pattern|errfile)"
    r"(=.*)?|(--output=)?([\w-]+(=[^,]*)?,)*(file|dir|directory|merge(-stderr-to-stdout)?|xml)(=.*|,.*)?"
)


@dataclass(frozen=True)
class Verdict:
    """The exit status of a job, and what is to be said about it: sentences."""

    status: int
    said: tuple[str, ...] = ()


class Reports:
    """Takes the ranks' reports out of what mpirun writes to stderr; everything else passes unchanged, at once.

    `tagged` where MPI may write a rank before each line. A report is written twice in a row: MPI carries pieces of
    4096 bytes, and between two pieces of one rank it may put those of others; no two reports are cut by one such seam.
    """

    def __init__(self, token: str, *, tagged: bool = False) -> None:
        self.began: set[int] = set()
        self.ended: dict[int, int] = {}  # exit status of each rank, in the order of their ends
        self._token = token.encode()
        self._report = re.compile(re.escape(self._token) + rb" (\d{1,9}) (" + BEGAN.encode() + rb"|\d{1,3})\n")
        self._tagged = tagged
        self._held = b""
        self._at_line_start = True

    def take(self, chunk: bytes) -> bytes:
        """What of `chunk`, and of what was held back before it, goes on; the start of a report is held back."""
        data = self._held + chunk
        out = bytearray()
        at = 0
        for found in self._report.finditer(data):
            out += data[at : found.start()]
            at = found.end()
            self._note(int(found[1]), found[2].decode())
            self._take_tag(out)
            if self._tagged and self._is_inside_line(out):
                out += b"\n"  # MPI ended the line with the report's end, and that is gone
        rest = data[at:]
        split = len(rest) - self._start_of_report(rest)
        out += rest[:split]
        self._held = self._take_tag(out) + rest[split:]
        if out:
            self._at_line_start = out.endswith(b"\n")
        return bytes(out)

    def rest(self) -> bytes:
        """What was held back when the stream has ended."""
        rest, self._held = self._held, b""
        return rest

    def _note(self, rank: int, word: str) -> None:
        self.began.add(rank)
        if word != BEGAN:
            self.ended.setdefault(rank, int(word))

    def _start_of_report(self, data: bytes) -> int:
        """How many bytes at the end may be the start of a report."""
        at = data.rfind(self._token)
        if at >= 0:
            after = data[at + len(self._token) :]
            if b"\n" not in after and len(after) < _LONGEST:
                return len(data) - at
        most = min(len(self._token) - 1, len(data))
        return next((size for size in range(most, 0, -1) if data.endswith(self._token[:size])), 0)

    def _take_tag(self, out: bytearray) -> bytes:
        """Cut a tag, or the start of one, from the end of `out`; what was cut."""
        found = _TAG.search(out) if self._tagged else None
        if found is None:
            return b""
        tag = bytes(found[0])
        del out[found.start() :]
        return tag

    def _is_inside_line(self, out: bytearray) -> bool:
        return not out.endswith(b"\n") if out else not self._at_line_start


def diverted(arguments: Sequence[str]) -> str:
    """The user's argument of mpirun that keeps the ranks' stderr from ddlrun; "" where none does."""
    return next((word for word in arguments if _DIVERTING.fullmatch(word)), "")


def judge(status: int, reports: Reports, places: Sequence[Place]) -> Verdict:
    """The job's exit status: mpirun's where that is not 0, and 0 only where every rank reported 0."""
    hosts = {one.rank: one.host for one in places}
    # Where mpirun failed, the rank that made it so: the others were ended for it.
    failed = [rank for rank, ended in reports.ended.items() if (ended == status if status else ended)]
    first = (
        f"rank {failed[0]} on {hosts.get(failed[0], '?')} ended with {_status(reports, failed[0])}" if failed else ""
    )
    if status:
        return Verdict(status, (first,) if first else ())
    if failed:
        return Verdict(reports.ended[failed[0]], (f"{first}, and mpirun returned 0 all the same",))
    silent: dict[str, list[int]] = {}
    for rank in sorted(hosts.keys() - reports.ended.keys()):
        silent.setdefault(hosts[rank], []).append(rank)
    if not silent:
        return Verdict(0)
    count = sum(map(len, silent.values()))
    lines = [f"mpirun returned 0, and {count} of {len(hosts)} ranks did not report their end: that is no success"]
    for host, ranks in list(silent.items())[:_SHOWN]:
        began = "began, and nothing came after it" if reports.began.intersection(ranks) else "did not begin"
        lines.append(f"host {host}: {_named(ranks)} {began}")
    if len(silent) > _SHOWN:
        lines.append(f"and {len(silent) - _SHOWN} more hosts")
    lines.append(f"when a host is lost, mpirun abandons the others, too; find it with: ddlrun doctor -H {_list(hosts)}")
    return Verdict(1, tuple(lines))


def _list(hosts: Mapping[int, str]) -> str:
    return ",".join(dict.fromkeys(hosts.values()))


def _status(reports: Reports, rank: int) -> str:
    ended = reports.ended[rank]
    return f"exit status {ended}" + (f" (signal {ended - 128})" if 128 < ended <= 128 + 64 else "")


def _named(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_SHOWN]))}{more}"
