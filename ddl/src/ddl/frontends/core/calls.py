"""Calls of front ends whose tensors lie in host memory: announced by name, begun once every rank has announced them.

A front end gives each call's tensors as a Slot. One thread waits for what is in flight, and ends the slots.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

import numpy as np

from ddl import job, request
from ddl.communicator import Communicator
from ddl.errors import DDLError, StateError
from ddl.frontends.core import arrays, rows
from ddl.frontends.core.announcements import Announcement
from ddl.frontends.core.arrays import Array, Requests
from ddl.frontends.core.ops import Op
from ddl.frontends.core.process_sets import Group, ProcessSet, ProcessSets


class Called(NamedTuple):
    """What a call does: all but its tensors."""

    kind: str  # "allreduce"
    name: str | None = None  # calls are matched by it, or by their order
    terms: str = ""  # of the announcement; a reduction's begins with its Op
    root: int = 0  # a rank of the job
    process_set: int = 0  # its process_set_id


class Slot(Protocol):
    """The tensors of a call."""

    @property
    def inputs(self) -> Sequence[Array]:
        """Those that are sent."""

    def output(self, index: int, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """Make a result."""

    def in_place(self, index: int) -> Array:
        """Make a result of an input's shape and type: the input itself, if nobody else reads it."""

    def pass_on(self, index: int) -> Array:
        """Make an input a result as it is."""

    def finish(self, error: Exception | None) -> None:
        """The results are there, or never will be."""


class ArraySlot:
    """NumPy arrays in, NumPy arrays out."""

    def __init__(self, inputs: Sequence[Array]) -> None:
        self.inputs = [np.asarray(array, order="C") for array in inputs]
        self._outputs: dict[int, Array] = {}
        self._error: Exception | None = None
        self._over = threading.Event()

    def output(self, index: int, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """As Slot says."""
        self._outputs[index] = np.empty(tuple(shape), dtype)
        return self._outputs[index]

    def in_place(self, index: int) -> Array:
        """As Slot says: always a new array."""
        return self.output(index, self.inputs[index].shape, self.inputs[index].dtype)

    def pass_on(self, index: int) -> Array:
        """As Slot says."""
        self._outputs[index] = self.inputs[index]
        return self._outputs[index]

    def finish(self, error: Exception | None) -> None:
        """As Slot says."""
        self._error = error
        self._over.set()

    def wait(self) -> list[Array]:
        """The results, once they are there. Raises the error that ended the call."""
        self._over.wait()
        if self._error is not None:
            raise self._error
        return [self._outputs[index] for index in sorted(self._outputs)]


class HostGroup:
    """The communicator of a process set."""

    def __init__(self, comm: Communicator, name: str) -> None:
        self.comm = comm

    def rank(self) -> int:
        """This rank's number in it."""
        return self.comm.rank

    def shutdown(self) -> None:
        """Free the communicator, if nothing is in flight on it."""
        with suppress(StateError):
            self.comm.free()


class HostProcessSet(ProcessSet[HostGroup]):
    """The ranks that take part in a call; `ProcessSet([0, 2])`. It works after `add_process_set`, or `init`."""


HostProcessSets = ProcessSets[HostProcessSet]


Finish = Callable[[Exception | None], None]


class Work:
    """Requests in flight. Once they are over, the reaper calls `finish`, if there is one."""

    def __init__(self, requests: Requests, finish: Finish | None = None) -> None:
        self._requests, self._finish = requests, finish
        self._error: DDLError | None = None
        self._over = False
        if finish is not None:
            _reaper.add(self)

    def settle(self) -> None:
        """Wait for the requests, and finish."""
        for each in self._requests:
            try:
                each.wait()
            except DDLError as error:  # the others end soon, too: their communicator is broken
                self._error = self._error or error
        self._over = True  # first: the call's name is free
        if self._error is not None:
            request.retain(self._finish)  # and the memory that it will not end with
        if self._finish is not None:
            self._finish(self._error)

    def is_completed(self) -> bool:
        """Whether it is over, in whatever way."""
        return self._over or (self._finish is None and all(each.test() for each in self._requests))

    def wait(self) -> None:
        """Block until it is over. Raises the DDLError that ended it."""
        if not self._over:
            self.settle()
        if self._error is not None:
            raise self._error


# By name: the calls that begin after the one in flight. A loop of a graph may be at its next turn before that is over.
_Name = tuple[int, str, str | None]
_later: dict[_Name, deque[tuple[Slot, Called, HostProcessSets]]] = {}
_naming = threading.Lock()


def begin(slot: Slot, what: Called, sets: HostProcessSets) -> None:
    """Announce a call, which begins when every rank has announced it. Errors go to the slot."""
    name = (what.process_set, what.kind, what.name)
    if what.name is not None:
        with _naming:
            if name in _later:
                _later[name].append((slot, what, sets))
                return
            _later[name] = deque()

    def finish(error: Exception | None) -> None:
        if what.name is not None:
            with _naming:
                others = _later.pop(name)
            for other in others:  # the first of them takes the name, the others wait again
                begin(*other)
        slot.finish(error)

    try:
        process_set = sets.numbered(what.process_set)
        start, per_rank = _KINDS[what.kind](slot, what, process_set)
        tensors = tuple((its.dtype.name, its.shape) for its in slot.inputs)
        process_set.negotiator.announce(
            what.kind,
            what.name,
            lambda announced, awaited: Work(start(announced), finish),
            tensors,
            what.terms,
            per_rank,
            finish,
        ).in_background()
    except Exception as error:
        finish(error)


def run(inputs: Sequence[Array], what: Called, sets: HostProcessSets) -> list[Array]:
    """Make a call of NumPy arrays, and return its results. Raises the error that ended it."""
    slot = ArraySlot(inputs)
    begin(slot, what, sets)
    return slot.wait()


def answer(announcement: Announcement, group: Group) -> Work:
    """Take part in an allreduce that other ranks announced, with arrays that leave their results as they are."""
    assert isinstance(group, HostGroup)
    op = _op_of(announcement.terms)
    neutral = [arrays.neutral(op, np.dtype(dtype), shape) for dtype, shape in announcement.tensors]
    return Work([its for array in neutral for its in arrays.allreduce(array, array, op, group.comm)])


Announced = Mapping[int, Announcement]
_Start = Callable[[Announced], Requests]


def _allreduce(slot: Slot, what: Called, process_set: HostProcessSet) -> tuple[_Start, tuple[int, ...]]:
    op, comm = _op_of(what.terms), process_set.group.comm
    for array in slot.inputs:
        arrays.check_reducible(array.dtype, op)

    def start(announced: Announced) -> Requests:
        made = [arrays.allreduce(array, slot.in_place(index), op, comm) for index, array in enumerate(slot.inputs)]
        return _joined(made)

    return start, ()


def _reducescatter(slot: Slot, what: Called, process_set: HostProcessSet) -> tuple[_Start, tuple[int, ...]]:
    op, comm = _op_of(what.terms), process_set.group.comm
    shares = []
    for array in slot.inputs:
        arrays.check_reducible(array.dtype, op)
        shares.append(rows.shares(rows.rows_of(array.shape, what.kind), comm.size))

    def start(announced: Announced) -> Requests:
        made = []
        for index, (array, its) in enumerate(zip(slot.inputs, shares, strict=True)):
            output = slot.output(index, (its[comm.rank], *array.shape[1:]), array.dtype)
            made.append(arrays.reduce_scatter(array, output, its, op, comm))
        return _joined(made)

    return start, ()


def _allgather(slot: Slot, what: Called, process_set: HostProcessSet) -> tuple[_Start, tuple[int, ...]]:
    comm = process_set.group.comm
    for array in slot.inputs:
        rows.rows_of(array.shape, what.kind)

    def start(announced: Announced) -> Requests:
        made = []
        for index, array in enumerate(slot.inputs):
            its = [announced[rank].tensors[index][1][0] for rank in range(comm.size)]
            output = slot.output(index, (sum(its), *array.shape[1:]), array.dtype)
            made.append(arrays.allgather(array, output, its, comm))
        return _joined(made)

    return start, ()


def _broadcast(slot: Slot, what: Called, process_set: HostProcessSet) -> tuple[_Start, tuple[int, ...]]:
    comm, root = process_set.group.comm, process_set.number_of(what.root)

    def start(announced: Announced) -> Requests:
        take = slot.pass_on if root == comm.rank else slot.in_place
        return _joined([arrays.broadcast(take(index), root, comm) for index in range(len(slot.inputs))])

    return start, ()


def _alltoall(slot: Slot, what: Called, process_set: HostProcessSet) -> tuple[_Start, tuple[int, ...]]:
    """Of a tensor; a second one has the rows for each rank, if they are not equal. Returns both of what came."""
    comm = process_set.group.comm
    array, splits = slot.inputs
    sent = rows.splits_of(splits.tolist() or None, rows.rows_of(array.shape, what.kind), comm.size)

    def start(announced: Announced) -> Requests:
        every = [announced[rank].per_rank for rank in range(comm.size)]
        received = [its[comm.rank] for its in every]
        output = slot.output(0, (sum(received), *array.shape[1:]), array.dtype)
        slot.output(1, (comm.size,), np.dtype(np.int32))[...] = received
        return arrays.alltoall(array, output, every, comm)

    return start, tuple(sent)


_KINDS = {
    "allreduce": _allreduce,
    "reducescatter": _reducescatter,
    "allgather": _allgather,
    "broadcast": _broadcast,
    "alltoall": _alltoall,
}


def _op_of(terms: str) -> Op:
    return Op[terms.partition(",")[0]]


def _joined(made: Sequence[Requests]) -> Requests:
    return [its for requests in made for its in requests]


class _Reaper:
    """A thread that settles works, in the order in which they began."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin anew: a forked child has none of the threads."""
        self._works: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, work: Work) -> None:
        self._works.put(work)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="ddl-reaper", daemon=True)
                self._thread.start()

    def end(self) -> None:
        """End the thread, and what is in flight: none may run while the interpreter shuts down."""
        if self._thread is not None:
            job.finalize()
            self._works.put(None)
            self._thread.join()

    def _serve(self) -> None:
        while (work := self._works.get()) is not None:
            work.settle()
            del work  # not while it waits for the next one: its tensors can go


_reaper = _Reaper()
atexit.register(_reaper.end)
os.register_at_fork(after_in_child=_reaper.reset)
