"""Rounds in which ranks tell one another which calls they announce.

Ranks first compare a digest (an allreduce): most often all announce the same calls. If some are only ahead of others, a
second digest shows it, and what they have announced more is put off. Otherwise each tells all others what it announces
(an allgather).
"""

from __future__ import annotations

import re
from contextlib import suppress
from ctypes import addressof, c_int64

import numpy as np

from ddl import request
from ddl.collectives import OPS, allgather
from ddl.communicator import Communicator
from ddl.elements import TYPES
from ddl.errors import RankTimeoutError, ShutdownError, StateError
from ddl.frontends.core.announcements import Batch, decode, digest, encode

_SHORT = 256  # bytes of announcements that need one message, with their length
_LENGTH = 8  # bytes that say it

# What libddl says of a round, whose number and communicator the script does not know.
_ROUND = re.compile(r" in all\w+ #\d+ of communicator \d+ \([^)]*\)")
_NO_ROUND = re.compile(
    r"has not called it; (it has made no call on this communicator|its last call was all\w+ #\d+ of communicator \d+ "
    r"\([^)]*\))"
)
_LEFT = re.compile(r"has freed the communicator( without calling it; its last call was [^()]*\([^)]*\))?")


class Rounds:
    """Those of a set of ranks. `digests` and `details` are communicators of theirs, for nothing else."""

    def __init__(self, digests: Communicator, details: Communicator) -> None:
        self.rank = digests.rank  #: this rank's number in the set
        self._size = digests.size
        self._digests, self._details = digests, details

    def take_part(self, mine: Batch) -> tuple[list[Batch], Batch]:
        """Announce a batch. Returns what each rank has announced, and the end of `mine` that is not part of it.

        Blocks until every rank takes part. Raises RankTimeoutError: a rank does not; and other DDLErrors.
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
        """Free the communicators; whether both are. Not while a round goes on, nor after the job is left."""
        for comm in (self._digests, self._details):
            with suppress(StateError):
                comm.free()
        return self._digests.is_freed and self._details.is_freed

    def _compare(self, mine: Batch) -> tuple[bool, int, int]:
        """Whether every rank's batch is the same, and the number of calls in the shortest and in the longest."""
        one, two = digest(mine)
        sent, greatest = (c_int64 * 6)(one, ~one, two, ~two, len(mine), ~len(mine)), (c_int64 * 6)()
        arguments = (addressof(sent), addressof(greatest), 6, TYPES["int64"].number, OPS["max"], self._digests.handle)
        request.run("ddl_allreduce", *arguments, buffers=(sent, greatest))
        same = greatest[0] == ~greatest[1] and greatest[2] == ~greatest[3]
        return same, ~greatest[5], greatest[4]

    def _tell(self, mine: Batch) -> list[Batch]:
        """Everyone's batch."""
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
        """Everyone's content, up to `nbytes` of it."""
        mine = np.frombuffer(content[:nbytes].ljust(nbytes), np.uint8)
        every = allgather(mine, comm=self._details).tobytes()
        return [every[start : start + nbytes] for start in range(0, len(every), nbytes)]
