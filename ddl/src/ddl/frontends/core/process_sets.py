"""Process sets: sets of ranks that call collectives among themselves, and the ranks' numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

import numpy as np

import ddl
from ddl.communicator import Communicator, create_group, split
from ddl.errors import StateError
from ddl.frontends.core.announcements import Announcement
from ddl.frontends.core.negotiation import Begun, Negotiator
from ddl.frontends.core.rounds import Rounds


class Group(Protocol):
    """A front end's object around a communicator, which sends its tensors."""

    def shutdown(self) -> None:
        """End it, and free the communicator."""

    def rank(self) -> int:
        """This rank's number in it."""


GroupT = TypeVar("GroupT", bound=Group)


class ProcessSet(Generic[GroupT]):
    """The ranks that take part in a call; `ProcessSet([0, 2])`. It works after `add_process_set`, or `init`."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks: list[int] = sorted(ranks)  #: numbers in the job
        self.process_set_id: int | None = None  #: from 0, the set of all; None if it is not added
        self._group: GroupT | None = None
        self._negotiator: Negotiator | None = None
        self._optimizers = 0
        self.remedy = "add_process_set"  #: the call that puts it to use

    @property
    def group(self) -> GroupT:
        """The group that makes its calls.

        Raises StateError if it was not added, ValueError if this rank is not in it.
        """
        if self.process_set_id is None:
            raise StateError(f"{self} is not in use: call {self.remedy} first")
        if self._group is None:
            raise ValueError(f"rank {ddl.rank()} is not in {self}: only its ranks may call with it")
        return self._group

    @property
    def negotiator(self) -> Negotiator:
        """The negotiator of its calls. Raises as `group`."""
        assert self.group is not None  # raises
        assert self._negotiator is not None
        return self._negotiator

    def count_optimizer(self) -> int:
        """Count one more optimizer of the set; returns its number, from 0."""
        self._optimizers += 1
        return self._optimizers - 1

    def meet(self, kind: str, terms: str = "") -> None:
        """Return when every rank of the set has called it with the same arguments. Raises as `group`, and DDLError."""
        self.negotiator.announce(kind, None, lambda *_: None, terms=terms).wait()

    def included(self) -> bool:
        """Whether this rank is in it. Raises StateError if it was not added."""
        if self.process_set_id is None:
            return self.group is not None  # raises
        return self._group is not None

    def rank(self) -> int:
        """This rank's number in the set. Raises StateError and ValueError as `group`."""
        return int(self.group.rank())

    def size(self) -> int:
        """The number of its ranks. Raises StateError if it was not added."""
        self.included()
        return len(self.ranks)

    def number_of(self, rank: int) -> int:
        """The number in the set of a rank of the job. Raises ValueError."""
        if rank not in self.ranks:
            raise ValueError(f"root_rank is {rank}, which is not in {self}")
        return self.ranks.index(rank)

    def __repr__(self) -> str:
        return f"ProcessSet({self.ranks})"


SetT = TypeVar("SetT", bound=ProcessSet)  # type: ignore[type-arg]  # of the front end's groups


class ProcessSets(Generic[SetT]):
    """The process sets of a front end.

    `kind` is its class of sets. `group_of` makes its group from a communicator and a name. `answer` begins, after this
    rank has joined, the calls that the others announced.
    """

    def __init__(
        self,
        kind: type[SetT],
        group_of: Callable[[Communicator, str], Group],
        answer: Callable[[Announcement, Group], Begun],
    ) -> None:
        self.everyone = kind([])
        self.everyone.remedy = "init()"
        self._kind, self._group_of, self._answer = kind, group_of, answer
        self._sets: dict[int, SetT] = {}
        self._made = 0  # numbers of sets are never reused
        self._local_ranks: list[int] = []  # of every rank

    def begin(self) -> None:
        """Make the set of all ranks, once the job is joined."""
        self.everyone.ranks = list(range(ddl.size()))
        # Not the job's own communicator, on which the script may make its own calls.
        self._register(self.everyone, 0, split(0))
        self._local_ranks = ddl.allgather(np.array([ddl.local_rank()])).ravel().tolist()

    def end(self) -> None:
        """Remove all sets."""
        for number in sorted(self._sets, reverse=True):
            self._forget(self._sets[number])

    def join(self) -> int:
        """Answer the others' reductions until every rank has joined; returns the last rank to join."""
        self.everyone.included()  # raises before init()
        mine = [its.negotiator for its in self._sets.values() if its.included()]
        calls = [negotiator.join() for negotiator in mine]
        for call in calls[1:]:
            call.in_background()
        for call in calls:
            call.wait()
        last, *_ = [negotiator.joined() for negotiator in mine]
        return last

    def add(self, process_set: SetT | Sequence[int]) -> SetT:
        """Put a set to use. Every rank calls it with the same ranks, in the same order of calls.

        Raises ValueError if a rank does not exist or is listed twice, or if the same set was added before.
        """
        made = process_set if isinstance(process_set, self._kind) else self._kind(process_set)  # type: ignore[arg-type]
        size = self.size()
        if not made.ranks or made.ranks[0] < 0 or made.ranks[-1] >= size or len(set(made.ranks)) != len(made.ranks):
            raise ValueError(f"{made}: a set has one or more different ranks of [0, {size})")
        if any(known.ranks == made.ranks for known in self._sets.values()):
            raise ValueError(f"{made} was added before: use that one, or remove it first")
        self.everyone.meet("add_process_set", f"ranks {made.ranks}")
        self._made += 1
        comm = create_group(made.ranks, self._made) if ddl.rank() in made.ranks else None
        self._register(made, self._made, comm)
        return made

    def remove(self, process_set: SetT) -> bool:
        """Remove a set; every rank calls it. False if it was not in use, or is the set of all ranks."""
        if process_set is self.everyone or process_set.process_set_id is None:
            return False
        self.everyone.meet("remove_process_set", f"ranks {process_set.ranks}")
        self._forget(process_set)
        return True

    def numbered(self, number: int) -> SetT:
        """The set of that `process_set_id`. Raises StateError if there is none."""
        if number not in self._sets:
            self.rank()  # raises before init()
            raise StateError(f"process set {number} is not in use: was it removed?")
        return self._sets[number]

    def is_initialized(self) -> bool:
        """Whether this process is part of a job: after `init`, before `shutdown`."""
        return self.everyone.process_set_id is not None

    def rank(self) -> int:
        """This process's rank in the job, from 0. Raises StateError before `init`."""
        return self.everyone.rank()

    def size(self) -> int:
        """The number of processes. Raises StateError before `init`."""
        return self.everyone.size()

    def local_rank(self) -> int:
        """This process's rank on its host, from 0. Raises StateError before `init`."""
        self.rank()
        return ddl.local_rank()

    def local_size(self) -> int:
        """The number of processes on this host. Raises StateError before `init`."""
        self.rank()
        return ddl.local_size()

    def cross_rank(self) -> int:
        """This process's number among the processes with its `local_rank` on all hosts.

        Raises StateError before `init`.
        """
        return self._local_ranks[: self.rank()].count(ddl.local_rank())

    def cross_size(self) -> int:
        """The number of hosts that have a process with this one's `local_rank`. Raises StateError before `init`."""
        self.rank()
        return self._local_ranks.count(ddl.local_rank())

    def is_homogeneous(self) -> bool:
        """Whether every host has the same number of processes. Raises StateError before `init`."""
        self.rank()
        return len({self._local_ranks.count(its) for its in set(self._local_ranks)}) == 1

    def _register(self, process_set: SetT, number: int, comm: Communicator | None) -> None:
        """`comm` has its ranks; None on a rank that is not in the set."""
        if comm is not None:
            group = process_set._group = self._group_of(comm, f"horovod-{number}")
            rounds = Rounds(split(0, comm=comm), split(0, comm=comm))
            answer = self._answer
            process_set._negotiator = Negotiator(
                process_set.ranks, rounds, lambda its: answer(its, group), lambda: _is_freed(comm)
            )
        process_set.process_set_id = number
        self._sets[number] = process_set

    def _forget(self, process_set: SetT) -> None:
        assert process_set.process_set_id is not None
        del self._sets[process_set.process_set_id]
        group, process_set._group = process_set._group, None
        negotiator, process_set._negotiator = process_set._negotiator, None
        process_set.process_set_id = None
        process_set._optimizers = 0  # not when it is put to use: an optimizer may have been made before
        if negotiator is not None:
            negotiator.end()
        if group is not None:
            group.shutdown()


def _is_freed(comm: Communicator) -> bool:
    """Free a communicator if nothing is in flight on it; returns whether it is free."""
    with suppress(StateError):
        comm.free()
    return comm.is_freed
