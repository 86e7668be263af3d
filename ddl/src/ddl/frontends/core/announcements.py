"""Announcements: the calls that each rank is ready to make, and which of them all ranks have announced.

Pure: no messages, no clock. Every rank keeps such a table, which gets the same announcements in the same rounds. So all
tables are equal, and all ranks begin their calls in one order, whatever the order in which each rank announced them.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ddl.errors import DDLError, MismatchError, RankTimeoutError, UnsupportedError

JOIN, WITHDRAW = "join", "withdraw"  # kinds that are not collectives

# The first dimension of their tensors may differ from rank to rank.
_UNEVEN = ("allgather", "alltoall")

_Tensors = tuple[tuple[str, tuple[int, ...]], ...]


class Announcement(NamedTuple):
    """A call that a rank is ready to make."""

    kind: str  # "allreduce"
    key: str  # calls are matched by it: "allreduce 'a'", or "#5", the fifth call without a name
    tensors: _Tensors = ()  # types and shapes
    terms: str = ""  # other values that must be the same on every rank: "Sum", "root 0"
    per_rank: tuple[int, ...] = ()  # numbers that may differ

    def __str__(self) -> str:
        what = self.kind if self.key.startswith("#") else self.key
        tensors = [f"{dtype} of shape {shape}" for dtype, shape in self.tensors[:3]]
        more = [f"{len(self.tensors) - 3} more tensors"] if len(self.tensors) > 3 else []
        terms = [self.terms] if self.terms else []
        inner = ", ".join(tensors + more + terms)
        return f"{what} ({inner})" if inner else what


# A rank's announcements in one round, in order; () if it has none. A JOIN or WITHDRAW comes alone: later calls of the
# rank belong to a later round.
Batch = tuple[Announcement, ...]


class Outcome(NamedTuple):
    """The fate of a call: every rank may begin it, or it ends with `error` on each rank of `announced`."""

    key: str
    announced: Mapping[int, Announcement]  # by rank
    error: DDLError | None


def digest(batch: Batch) -> tuple[int, int]:
    """Two numbers of 63 bits that differ if the batches differ. Both are 0 for the empty batch."""
    if not batch:
        return 0, 0
    # Calls without a name have a new key each time, but the same contents come again in each step and are hashed once.
    # UTF-8 never has the separator, and a content's hash has a fixed length, so only equal batches have equal parts.
    parts = [_SEPARATOR.join((its.key.encode(), _content(its.kind, *its[2:]))) for its in batch]
    number = int.from_bytes(hashlib.blake2b(b"".join(parts), digest_size=16).digest(), "little")
    return number & (2**63 - 1), number >> 65


_SEPARATOR = b"\xff"


@functools.lru_cache(1024)
def _content(kind: str, tensors: _Tensors, terms: str, per_rank: tuple[int, ...]) -> bytes:
    return hashlib.blake2b(json.dumps((kind, tensors, terms, per_rank)).encode(), digest_size=32).digest()


def encode(batch: Batch) -> bytes:
    """The bytes of a batch for sending."""
    return json.dumps(batch).encode()


def size_of(its: Announcement) -> int:
    """An upper bound on its bytes in the output of `encode`."""
    return len(json.dumps(its.key)) + _size_without_key(its.kind, *its[2:])


@functools.lru_cache(1024)
def _size_without_key(kind: str, tensors: _Tensors, terms: str, per_rank: tuple[int, ...]) -> int:
    return len(json.dumps((kind, "", tensors, terms, per_rank)))


def decode(content: bytes) -> Batch:
    """The inverse of `encode`."""
    return tuple(
        Announcement(kind, key, tuple((dtype, tuple(shape)) for dtype, shape in tensors), terms, tuple(per_rank))
        for kind, key, tensors, terms, per_rank in json.loads(content)
    )


class Table:
    """The announcements of `ranks`, given by their numbers in the job. Inside the table ranks are counted from 0."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks
        self._rounds = 0
        self.waiting: dict[str, dict[int, Announcement]] = {}  #: by key: calls that some rank has not announced yet
        self._last: dict[int, Announcement] = {}  # of each rank
        self._joined: dict[int, tuple[int, int, int]] = {}  # of each: the values that `last_to_join` compares
        # By key, for each rank: how many calls were given up that it had not announced. It may still make them late.
        self._given_up: dict[str, Counter[int]] = {}
        self._miscounted = ""  # why calls without a name, which are matched by counting, cannot be matched any more

    def take(self, said: Sequence[Batch]) -> list[Outcome]:
        """Take in a round: each rank's batch. Returns the calls to begin or to end now, in this order."""
        self._rounds += 1
        first = said[0]
        if first and not self._joined and _all_same(said) and not any(map(self._is_special, first)):
            ranks = range(len(said))
            self._last = dict.fromkeys(ranks, first[-1])
            return [Outcome(its.key, dict.fromkeys(ranks, its), None) for its in first]
        outcomes, withdrawals = [], []
        for rank, batch in enumerate(said):
            for its in batch:
                if its.kind == WITHDRAW:
                    withdrawals.append((its.key, rank))
                elif its.kind == JOIN:
                    self._joined[rank] = (its.per_rank[0], self._rounds, rank)
                else:
                    outcomes += self._announced(rank, its)
        outcomes += self._ready()
        for key, rank in withdrawals:
            # Only if this rank still waits: the last rank may just have called it, or another rank withdrawn it.
            if rank in self.waiting.get(key, {}):
                outcomes += self._uncounted(key) if key.startswith("#") else [self._withdrawn(key)]
        return outcomes

    def last_to_join(self) -> int | None:
        """The last rank to join, once every rank has joined (all may then make calls again); None before.

        It is the rank that announced the most calls; among equals, the one that joined in the latest round.
        """
        if len(self._joined) < len(self._ranks):
            return None
        _, _, last = max(self._joined.values())
        self._joined.clear()
        self._given_up.clear()  # the next calls are counted from 0 again
        self._miscounted = ""
        return last

    def missing(self, key: str) -> list[int]:
        """The ranks that have neither announced a call nor joined."""
        announced = self.waiting[key]
        return [rank for rank in range(len(self._ranks)) if rank not in announced and rank not in self._joined]

    def hindrance(self, key: str) -> str:
        """Why a call does not begin: "rank 1 has not called it; its last call was barrier"."""
        late = self.missing(key)
        named = f"{self._names(late)} {'has' if len(late) == 1 else 'have'} not called it"
        lasts = [
            f"{'its' if len(late) == 1 else self._name(rank) + chr(39) + 's'} last call was {self._last[rank]}"
            for rank in late[:3]
            if rank in self._last
        ]
        return "; ".join([named, *lasts])

    def _is_special(self, its: Announcement) -> bool:
        """Whether its fate depends on more than this round."""
        return (
            its.kind in (JOIN, WITHDRAW)
            or its.key in self._given_up
            or bool(self._miscounted and its.key.startswith("#"))
        )

    def _announced(self, rank: int, its: Announcement) -> list[Outcome]:
        """Take in a rank's announcement. Returns how the call ends, if it need not wait for other ranks."""
        self._last[rank] = its
        if self._miscounted and its.key.startswith("#"):
            return [Outcome(its.key, {rank: its}, RankTimeoutError(self._miscounted))]
        if self._is_late(its.key, rank):
            return [self._late(rank, its)]
        self.waiting.setdefault(its.key, {})[rank] = its
        return []

    def _withdrawn(self, key: str) -> Outcome:
        hindrance = self.hindrance(key)
        self._given_up.setdefault(key, Counter()).update(self.missing(key))
        announced = self.waiting.pop(key)
        error = RankTimeoutError(
            f"{self._names(list(announced))} called {next(iter(announced.values()))} and waited longer than "
            f"DDL_TIMEOUT allows: {hindrance}: every rank must call the same names; the job goes on"
        )
        return Outcome(key, announced, error)

    def _uncounted(self, key: str) -> list[Outcome]:
        """End all calls without a name: a late call and a call that was left out look the same."""
        announced = self.waiting[key]
        self._miscounted = (
            f"{self._names(list(announced))} called {next(iter(announced.values()))} and waited longer than "
            f"DDL_TIMEOUT allows: {self.hindrance(key)}: every rank must make as many calls without a name, in the "
            "same order. They are matched by counting, so no other call without a name can be made; others go on"
        )
        lost = [(other, self.waiting.pop(other)) for other in list(self.waiting) if other.startswith("#")]
        return [Outcome(other, calls, RankTimeoutError(self._miscounted)) for other, calls in lost]

    def _is_late(self, key: str, rank: int) -> bool:
        return self._given_up.get(key, Counter())[rank] > 0

    def _late(self, rank: int, its: Announcement) -> Outcome:
        """End a call that the others have given up: it must not be matched with their next one."""
        owed = self._given_up[its.key]
        owed[rank] -= 1
        if not any(owed.values()):
            del self._given_up[its.key]
        error = RankTimeoutError(
            f"{self._name(rank)} called {its} too late: the ranks that had called it waited longer than DDL_TIMEOUT "
            "allows, and gave it up with an error; the job goes on"
        )
        return Outcome(its.key, {rank: its}, error)

    def _ready(self) -> list[Outcome]:
        outcomes = []
        for key, announced in list(self.waiting.items()):
            missing = self.missing(key)
            absent = [rank for rank in self._joined if rank not in announced]
            kind = next(iter(announced.values())).kind
            if absent and kind != "allreduce":
                error: DDLError | None = self._left_alone(announced, absent)
            elif missing:
                continue
            else:
                error = self._difference(announced)
            outcomes.append(Outcome(key, self.waiting.pop(key), error))
        return outcomes

    def _left_alone(self, announced: Mapping[int, Announcement], absent: list[int]) -> DDLError:
        its = next(iter(announced.values()))
        hint = "; sparse gradients need sparse_as_dense=True" if its.kind == "allgather" else ""
        return UnsupportedError(
            f"{self._names(list(announced))} called {its} after {self._names(absent)} had joined, but until all have "
            f"joined only allreduce, and an optimizer's steps, go on without a rank{hint}"
        )

    def _difference(self, announced: Mapping[int, Announcement]) -> DDLError | None:
        one, its = next(iter(announced.items()))
        for other, theirs in announced.items():
            if its != theirs and _comparable(its) != _comparable(theirs):
                return MismatchError(
                    f"{self._name(one)} called {its}, but {self._name(other)} called {theirs}: every rank must make "
                    "the same calls, with the same types and shapes"
                    + ("; those without a name in the same order" if its.key.startswith("#") else "")
                )
        return None

    def _name(self, rank: int) -> str:
        return f"rank {self._ranks[rank]}"

    def _names(self, ranks: list[int]) -> str:
        """`rank 1`, or `ranks 1, 2`."""
        shown = [str(self._ranks[rank]) for rank in ranks[:8]] + (["..."] if len(ranks) > 8 else [])
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(shown)}"


def _all_same(said: Sequence[Batch]) -> bool:
    return all(its is said[0] or its == said[0] for its in said)


def _comparable(its: Announcement) -> tuple[object, ...]:
    tensors = its.tensors
    if its.kind in _UNEVEN:
        tensors = tuple((dtype, (len(shape), *shape[1:])) for dtype, shape in tensors)
    return its.kind, tensors, its.terms
