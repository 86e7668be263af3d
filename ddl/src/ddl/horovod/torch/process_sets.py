"""Sets of ranks that call collectives among themselves."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import ddl
from ddl.communicator import Communicator, create_group, split
from ddl.errors import StateError
from ddl.horovod.announcements import Announcement
from ddl.horovod.negotiation import Negotiator
from ddl.horovod.rounds import Rounds
from ddl.horovod.torch import starting
from ddl.torch import job
from ddl.torch.process_group import ProcessGroup
from ddl.torch.work import Work


class ProcessSet:
    """The ranks that take part in a call; `ProcessSet([0, 2])`. It works after `add_process_set`, or `init`."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks: list[int] = sorted(ranks)  #: numbers among all ranks
        self.process_set_id: int | None = None  #: from 0, the set of all; None if it is not added
        self._group: ProcessGroup | None = None
        self._negotiator: Negotiator | None = None
        self._optimizers = 0

    @property
    def group(self) -> ProcessGroup:
        """What its calls go through. Raises StateError: it was not added; ValueError: this rank is not in it."""
        if self.process_set_id is None:
            hint = "call init() first" if self is global_process_set else "call add_process_set first"
            raise StateError(f"{self} is not in use: {hint}")
        if self._group is None:
            raise ValueError(f"rank {ddl.rank()} is not in {self}: only its ranks may call with it")
        return self._group

    @property
    def negotiator(self) -> Negotiator:
        """What agrees on its calls. Raises as `group`."""
        assert self.group is not None  # raises
        assert self._negotiator is not None
        return self._negotiator

    def count_optimizer(self) -> int:
        """The number of one more optimizer of the set, from 0."""
        self._optimizers += 1
        return self._optimizers - 1

    def meet(self, kind: str, terms: str = "") -> None:
        """Return when every rank of the set has called it with the same arguments. Raises as `group`, and DDLError."""
        self.negotiator.announce(kind, None, lambda *_: None, terms=terms).wait()

    @property
    def _number(self) -> int:
        assert self.process_set_id is not None
        return self.process_set_id

    def included(self) -> bool:
        """Whether this rank is in it. Raises StateError: it was not added."""
        if self.process_set_id is None:
            return self.group is not None  # raises
        return self._group is not None

    def rank(self) -> int:
        """This rank's number in the set. Raises StateError and ValueError as `group`."""
        return int(self.group.rank())

    def size(self) -> int:
        """How many ranks it has. Raises StateError: it was not added."""
        self.included()
        return len(self.ranks)

    def number_of(self, rank: int) -> int:
        """The number in the set of one of all ranks. Raises ValueError."""
        if rank not in self.ranks:
            raise ValueError(f"root_rank is {rank}, which is not in {self}")
        return self.ranks.index(rank)

    def __repr__(self) -> str:
        return f"ProcessSet({self.ranks})"


global_process_set = ProcessSet([])

_sets: dict[int, ProcessSet] = {}
_device = -1  # a GPU's number, for `starting.answer`


def begin() -> None:
    """Join the job, and make the set of all ranks."""
    job.enter()
    try:
        global_process_set.ranks = list(range(ddl.size()))
        # Not the job's own communicator, which the script may use in an order of its own.
        _register(global_process_set, 0, split(0))
    except BaseException:
        job.leave()
        raise


def end() -> None:
    """Remove all sets, and leave the job."""
    if not _sets:
        return
    job.leave()  # before the communicators go: a rank that waits for this one on them is told that it has left
    for number in sorted(_sets, reverse=True):
        _forget(_sets[number])


def join(device: int) -> int:
    """Answer the others' reductions until every rank has called it; returns the one that was the last to."""
    global _device
    mine = [its.negotiator for its in _sets.values() if its.included()]
    global_process_set.included()  # raises before init()
    # Which GPU is the current one differs from thread to thread, and another thread may answer.
    _device = torch.cuda.current_device() if device < 0 and torch.cuda.is_available() else device
    calls = [negotiator.join() for negotiator in mine]
    for call in calls[1:]:
        call.in_background()
    for call in calls:
        call.wait()
    last, *_ = [negotiator.joined() for negotiator in mine]
    return last


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Put a set to use. Every rank calls it with the same ranks, in the same order of calls.

    Raises ValueError: a rank that there is not, or twice; or the same set was added before.
    """
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    size = global_process_set.size()
    if not made.ranks or made.ranks[0] < 0 or made.ranks[-1] >= size or len(set(made.ranks)) != len(made.ranks):
        raise ValueError(f"{made}: a set has one or more different ranks of [0, {size})")
    for known in _sets.values():
        if known.ranks == made.ranks:
            raise ValueError(f"{made} was added before: use that one, or remove it first")
    global_process_set.meet("add_process_set", f"ranks {made.ranks}")
    number = _count()
    _register(made, number, create_group(made.ranks, number) if ddl.rank() in made.ranks else None)
    return made


def remove_process_set(process_set: ProcessSet) -> bool:
    """Every rank calls it: the set is of no use from then on. False if it was not in use, or is the set of all."""
    if process_set is global_process_set or process_set.process_set_id is None:
        return False
    global_process_set.meet("remove_process_set", f"ranks {process_set.ranks}")
    _forget(process_set)
    return True


_made = 0  # numbers of sets are not used again


def _count() -> int:
    global _made
    _made += 1
    return _made


def _register(process_set: ProcessSet, number: int, comm: Communicator | None) -> None:
    """`comm`: of its ranks; None on a rank that is not in it."""
    if comm is not None:
        group = ProcessGroup(None, comm, f"horovod-{number}")

        def answer(announcement: Announcement) -> Work:
            return starting.answer(announcement, group, _device)

        process_set._group = group
        rounds = Rounds(split(0, comm=comm), split(0, comm=comm))
        process_set._negotiator = Negotiator(process_set.ranks, rounds, answer)
    process_set.process_set_id = number
    process_set._optimizers = 0
    _sets[number] = process_set


def _forget(process_set: ProcessSet) -> None:
    del _sets[process_set._number]
    group, process_set._group = process_set._group, None
    negotiator, process_set._negotiator = process_set._negotiator, None
    process_set.process_set_id = None
    if negotiator is not None:
        negotiator.end()
    if group is not None:
        group.shutdown()
