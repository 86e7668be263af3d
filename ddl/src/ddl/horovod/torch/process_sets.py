"""Sets of ranks that call collectives among themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import ddl
from ddl.communicator import Communicator, create_group, split
from ddl.errors import StateError
from ddl.horovod.torch.call_log import Call, LoggedGroup
from ddl.horovod.torch.joining import Joining, Key
from ddl.torch import job


class ProcessSet:
    """The ranks that take part in a call; `ProcessSet([0, 2])`. It works after `add_process_set`, or `init`."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self.ranks: list[int] = sorted(ranks)  #: numbers among all ranks
        self.process_set_id: int | None = None  #: from 0, the set of all; None where it is not added
        self._group: LoggedGroup | None = None
        self._more: dict[LoggedGroup, int] = {}  # their numbers in the set, in which 0 is that of `group`
        self._made = 0  # of `_more`, in all

    @property
    def group(self) -> LoggedGroup:
        """What its calls go through. Raises StateError: it was not added; ValueError: this rank is not in it."""
        if self.process_set_id is None:
            hint = "call init() first" if self is global_process_set else "call add_process_set first"
            raise StateError(f"{self} is not in use: {hint}")
        if self._group is None:
            raise ValueError(f"rank {ddl.rank()} is not in {self}: only its ranks may call with it")
        return self._group

    def add_group(self, name: str) -> LoggedGroup:
        """Another group of these ranks, with an order of calls of its own, until `end_group` or the set's end.

        Collective over the set; blocks. Raises as `group`.
        """
        self.group.log(Call("DistributedOptimizer"))
        self._made += 1
        made = _group_of(split(0, comm=self.group.communicator), name, (self._number, self._made))
        self._more[made] = self._made
        return made

    def end_group(self, group: LoggedGroup) -> None:
        """End one that `add_group` made; not collective. Doing it twice does nothing."""
        if group in self._more:
            _end_group(group, (self._number, self._more.pop(group)))

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
_joining: Joining | None = None  # of the job


def begin() -> None:
    """Join the job, and make the set of all ranks."""
    global _joining
    job.enter()
    try:
        global_process_set.ranks = list(range(ddl.size()))
        _joining = Joining(split(0))
        group = _group_of(Communicator(None), "horovod", (0, 0), leave=_leave)
    except BaseException:
        _leave()
        raise
    _register(global_process_set, 0, group)


def _leave() -> None:
    global _joining
    ended, _joining = _joining, None
    if ended is not None:
        ended.end()
    job.leave()


def end() -> None:
    """Remove all sets, and leave the job."""
    for number in sorted(_sets, reverse=True):
        _forget(_sets[number])


def join(device: int) -> int:
    """Answer the others' reductions until every rank has called it; returns the one that was the last to."""
    global_process_set.included()  # raises before init()
    assert _joining is not None
    return _joining.join(device)


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
    global_process_set.group.log(Call("add_process_set"))
    number = _count()
    group = None
    if ddl.rank() in made.ranks:
        group = _group_of(create_group(made.ranks, number), f"horovod-{number}", (number, 0))
    _register(made, number, group)
    return made


def remove_process_set(process_set: ProcessSet) -> bool:
    """Every rank calls it: the set is of no use from then on. False where it was not in use, or is the set of all."""
    if process_set is global_process_set or process_set.process_set_id is None:
        return False
    global_process_set.group.log(Call("remove_process_set"))
    _forget(process_set)
    return True


_made = 0  # numbers of sets are not used again


def _count() -> int:
    global _made
    _made += 1
    return _made


def _group_of(comm: Communicator, name: str, key: Key, leave: Callable[[], None] | None = None) -> LoggedGroup:
    assert _joining is not None
    made = LoggedGroup(comm, name, _joining.listener(key), leave)
    _joining.add_group(key, made)
    return made


def _end_group(group: LoggedGroup, key: Key) -> None:
    if _joining is not None:
        _joining.forget_group(key)
    group.shutdown()


def _register(process_set: ProcessSet, number: int, group: LoggedGroup | None) -> None:
    process_set.process_set_id = number
    process_set._group = group
    _sets[number] = process_set
    if group is not None:
        assert _joining is not None
        _joining.add_set(number, process_set.ranks)


def _forget(process_set: ProcessSet) -> None:
    number = process_set._number
    del _sets[number]
    # Before the job is left, which the last group does: their communicators are of that job.
    for more in list(process_set._more):
        process_set.end_group(more)
    group, process_set._group = process_set._group, None
    process_set.process_set_id = None
    if group is not None:
        assert _joining is not None
        _joining.forget_set(number)
        _end_group(group, (number, 0))
