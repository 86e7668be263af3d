"""What ranks announce before they begin a call, and which calls all of them have announced.

Pure: no messages, no clock. Every rank keeps such a table and is given the same announcements in the same rounds. So
all tables are the same, and all ranks begin their calls in one order, whatever order each announced them in.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ddl.errors import DDLError, MismatchError, RankTimeoutError, UnsupportedError

JOIN, WITHDRAW = "join", "withdraw"  # kinds that are no collectives

# The first dimension of their tensors may differ from rank to rank.
_UNEVEN = ("allgather", "alltoall")

_Tensors = tuple[tuple[str, tuple[int, ...]], ...]


class Announcement(NamedTuple):
    """A call that a rank is ready to make."""

    kind: str  # "allreduce"
    key: str  # what calls are matched by: "allreduce 'a'", or "#5", the fifth call without a name
    tensors: _Tensors = ()  # their types and shapes
    terms: str = ""  # what else must be the same on every rank: "Sum", "root 0"
    per_rank: tuple[int, ...] = ()  # numbers that may differ

    def __str__(self) -> str:
        what = self.kind if self.key.startswith("#") else self.key
        tensors = [f"{dtype} of shape {shape}" for dtype, shape in self.tensors[:3]]
        more = [f"{len(self.tensors) - 3} more tensors"] if len(self.tensors) > 3 else []
        terms = [self.terms] if self.terms else []
        inner = ", ".join(tensors + more + terms)
        return f"{what} ({inner})" if inner else what


# What a rank announces in one round, in its order; () if it has nothing to say. A JOIN or WITHDRAW comes alone: a call
# that the rank makes after it belongs to a later round.
Batch = tuple[Announcement, ...]


class Outcome(NamedTuple):
    """What has become of a call: every rank may begin it, or it ends with the error, on each rank of `announced`."""

    key: str
    announced: Mapping[int, Announcement]  # by rank
    error: DDLError | None


def digest(batch: Batch) -> tuple[int, int]:
    """Two numbers of 63 bits that differ if the batches differ. Both are 0 for the empty batch."""
    if not batch:
        return 0, 0
    # Calls without a name have a new key each time, but the contents of a training's calls come again: they are hashed
    # once. The separator is in no UTF-8, and a content has a fixed length, so only equal batches have equal parts.
    parts = [_SEPARATOR.join((its.key.encode(), _content(its.kind, *its[2:]))) for its in batch]
    number = int.from_bytes(hashlib.blake2b(b"".join(parts), digest_size=16).digest(), "little")
    return number & (2**63 - 1), number >> 65


_SEPARATOR = b"\xff"


@functools.lru_cache(1024)
def _content(kind: str, tensors: _Tensors, terms: str, per_rank: tuple[int, ...]) -> bytes:
    return hashlib.blake2b(json.dumps((kind, tensors, terms, per_rank)).encode(), digest_size=32).digest()


def encode(batch: Batch) -> bytes:
    """The bytes that are sent for it."""
    return json.dumps(batch).encode()


def size_of(its: Announcement) -> int:
    """Bytes that it takes in what `encode` makes, at most."""
    return len(json.dumps(its.key)) + _size_without_key(its.kind, *its[2:])


@functools.lru_cache(1024)
def _size_without_key(kind: str, tensors: _Tensors, terms: str, per_rank: tuple[int, ...]) -> int:
    return len(json.dumps((kind, "", tensors, terms, per_rank)))


def decode(content: bytes) -> Batch:
    """The batch that `encode` made these bytes of."""
    return tuple(
        Announcement(kind, key, tuple((dtype, tuple(shape)) for dtype, shape in tensors), terms, tuple(per_rank))
        for kind, key, tensors, terms, per_rank in json.loads(content)
    )


class Table:
    """What `ranks` (by their numbers among all) have announced. Within it a rank is a number from 0 to len(ranks)."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks
        self._rounds = 0
        self.waiting: dict[str, dict[int, Announcement]] = {}  #: by key: calls that a rank has not announced yet
        self._last: dict[int, Announcement] = {}  # of each rank
        self._joined: dict[int, tuple[int, int, int]] = {}  # of each: what `last_to_join` compares
        # By key: how many calls were given up that each rank had not announced. It may be late, and still make them.
        self._given_up: dict[str, Counter[int]] = {}
        self._miscounted = ""  # why calls without a name, which are counted, cannot be matched any more

    def take(self, said: Sequence[Batch]) -> list[Outcome]:
        """A round: what each rank said in it. Returns what is to be done now, in this order."""
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
            # Not if its last rank has called it just now, or another has withdrawn it before: then this is the next.
            if rank in self.waiting.get(key, {}):
                outcomes += self._uncounted(key) if key.startswith("#") else [self._withdrawn(key)]
        return outcomes

    def last_to_join(self) -> int | None:
        """None until every rank has joined; then the one that was the last, and all may make calls again.

        That is the one which has announced the most calls, or, of several, which joined in the latest round.
        """
        if len(self._joined) < len(self._ranks):
            return None
        _, _, last = max(self._joined.values())
        self._joined.clear()
        self._given_up.clear()  # the next calls are counted from 0 again
        self._miscounted = ""
        return last

    def missing(self, key: str) -> list[int]:
        """Ranks that have neither announced a call nor joined."""
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
        """Whether more than what the ranks say in this round decides what becomes of it."""
        return (
            its.kind in (JOIN, WITHDRAW)
            or its.key in self._given_up
            or bool(self._miscounted and its.key.startswith("#"))
        )

    def _announced(self, rank: int, its: Announcement) -> list[Outcome]:
        """A rank has announced a call. Returns how it ends, if it does not wait for other ranks."""
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
        """The end of all calls without a name: a late call and one that was left out cannot be told apart."""
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
        """A call that the others have given up: it must not meet their next one."""
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
        """Of one: "rank 1"; of several: "ranks 1, 2"."""
        shown = [str(self._ranks[rank]) for rank in ranks[:8]] + (["..."] if len(ranks) > 8 else [])
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(shown)}"


def _all_same(said: Sequence[Batch]) -> bool:
    return all(its is said[0] or its == said[0] for its in said)


def _comparable(its: Announcement) -> tuple[object, ...]:
    tensors = its.tensors
    if its.kind in _UNEVEN:
        tensors = tuple((dtype, (len(shape), *shape[1:])) for dtype, shape in tensors)
    return its.kind, tensors, its.terms
