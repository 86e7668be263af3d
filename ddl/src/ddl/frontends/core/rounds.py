"""Rounds in which ranks exchange announcements of calls.

Ranks first compare a digest (an allreduce): usually all announce the same calls. If some ranks are only ahead of
others, a second digest shows this, and their extra announcements are put off. Otherwise each rank sends its
announcements to all others (an allgather).
"""

from __future__ import annotations

import re
from contextlib import suppress
from ctypes import addressof, c_int64

import numpy as np

from ddl.collectives import OPS, allgather
from ddl.communicator import Communicator
from ddl.elements import TYPES
from ddl.errors import RankTimeoutError, ShutdownError, StateError
from ddl.frontends.core.announcements import Batch, decode, digest, encode
from ddl.request import Call

_SHORT = 256  # bytes of announcements that fit in one message, with their length
_LENGTH = 8  # bytes of that length

# libddl's words about a round; its number and communicator mean nothing to the user's script.
_ROUND = re.compile(r" in all\w+ #\d+ of communicator \d+ \([^)]*\)")
_NO_ROUND = re.compile(
    r"has not called it; (it has made no call on this communicator|its last call was all\w+ #\d+ of communicator \d+ "
    r"\([^)]*\))"
)
_LEFT = re.compile(r"has freed the communicator( without calling it; its last call was [^()]*\([^)]*\))?")


class Rounds:
    """The rounds of a set of ranks, over two communicators of the set that nothing else uses."""

    def __init__(self, digests: Communicator, details: Communicator) -> None:
        self.rank = digests.rank  #: this rank's number in the set
        self._size = digests.size
        self._digests, self._details = digests, details

    def take_part(self, mine: Batch) -> tuple[list[Batch], Batch]:
        """Announce a batch. Returns each rank's announcements, and the end of `mine` that was put off.

        Blocks until every rank takes part. Raises RankTimeoutError if a rank does not, and other DDLErrors.
        """
        try:
            same, shortest, longest = self._compare(mine)
            if same:
                return [mine] * self._size, ()
            if 0 < shortest < longest:
                same, _, _ = self._compare(mine[:shortest])
                if same:
                    return [mine[:shortest]] * self._size, mine[shortest:]
            return self._tell(mine), ()
        except (RankTimeoutError, ShutdownError) as error:
            words = _LEFT.sub("has left the process set, by shutdown() or after an error of its own", str(error))
            raise type(error)(_NO_ROUND.sub("has made no call", _ROUND.sub("", words))) from error

    def free(self) -> bool:
        """Free the communicators; returns whether both are free.

        Not possible during a round or after leaving the job.
        """
        for comm in (self._digests, self._details):
            with suppress(StateError):
                comm.free()
        return self._digests.is_freed and self._details.is_freed

    def _compare(self, mine: Batch) -> tuple[bool, int, int]:
        """Whether every rank's batch is the same, and the number of calls in the shortest and in the longest."""
        one, two = digest(mine)
        sent, greatest = (c_int64 * 6)(one, ~one, two, ~two, len(mine), ~len(mine)), (c_int64 * 6)()
        arguments = (addressof(sent), addressof(greatest), 6, TYPES["int64"].number, OPS["max"], self._digests.handle)
        Call("allreduce", arguments, (sent, greatest), None).run()
        same = greatest[0] == ~greatest[1] and greatest[2] == ~greatest[3]
        return same, ~greatest[5], greatest[4]

    def _tell(self, mine: Batch) -> list[Batch]:
        """The batch of each rank."""
        content = encode(mine)
        heads = self._gather(len(content).to_bytes(_LENGTH, "little") + content, _SHORT)
        lengths = [int.from_bytes(its[:_LENGTH], "little") for its in heads]
        contents = [its[_LENGTH:] for its in heads]
        if max(lengths) > _SHORT - _LENGTH:
            contents = self._gather(content, max(lengths))
        contents = [its[:length] for its, length in zip(contents, lengths, strict=True)]
        batches = {its: decode(its) for its in set(contents)}  # most ranks announce the same
        return [batches[its] for its in contents]

    def _gather(self, content: bytes, nbytes: int) -> list[bytes]:
        """The content of each rank, at most `nbytes` of it."""
        mine = np.frombuffer(content[:nbytes].ljust(nbytes), np.uint8)
        every = allgather(mine, comm=self._details).tobytes()
        return [every[start : start + nbytes] for start in range(0, len(every), nbytes)]
