"""Ranks that run out of data before the others: `join`.

A rank that joins tells all others so. In each set of ranks that it is in it asks one that has not joined, its teller,
for the calls that it lacks there; the teller describes them, and each that it makes from then on, until it joins, too.
The joined rank makes the same calls, with tensors that change no result, until every rank has joined and none has made
a call that it lacks.

A rank that has not joined may be computing, or waiting in a call for the one that has: a thread listens for it, ten
times a second. Ranks join again and again; their messages carry the number of the round.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from ddl.collectives import barrier
from ddl.communicator import Communicator
from ddl.errors import DDLError, ShutdownError, StateError, UnsupportedError
from ddl.horovod.torch.call_log import Call, Listener, LoggedGroup
from ddl.horovod.torch.messages import Messages
from ddl.horovod.torch.ops import of_torch
from ddl.torch.work import Work

_PERIOD = 0.1  # seconds between two looks of a rank that has not joined
_SHORTEST_NAP, _LONGEST_NAP = 50e-6, 1e-3  # seconds, of one that has
_LOSS_PERIOD = 1.0  # seconds between its looks whether the others still are there

Key = tuple[int, int]  # of a group: the number of its set, of which 0 has all ranks, and its number in the set


class Joined(NamedTuple):
    """A rank has joined."""

    round: int
    calls: Mapping[Key, int]  # that it has made, by group
    time: int  # by its clock, in ns


class Ask(NamedTuple):
    """A rank that has joined wants to be told calls of a set."""

    round: int
    set_number: int
    calls: Mapping[int, int]  # that it has made, by group


class Told(NamedTuple):
    """A call that the teller has made."""

    key: Key
    number: int  # of the calls in its group, from 0
    call: Call


class Left(NamedTuple):
    """A rank has left the job, or is about to."""


_ENDED = Call("a collective, and ended its optimizer or process set while that was in flight")


class Joining:
    """This rank's part. `comm`: of all ranks, for nothing else."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._messages = Messages(comm)
        self._lock = threading.RLock()  # guards the rest, and keeps messages in their order
        self._round = 0
        self._has_joined = False
        self._sets: dict[int, Sequence[int]] = {}  # their ranks
        self._groups: dict[Key, LoggedGroup] = {}
        self._calls: dict[Key, int] = {}  # that were made, also in groups that are forgotten
        self._joined: dict[tuple[int, int], Joined] = {}  # by round and rank
        self._left: set[int] = set()  # ranks
        self._asks: list[tuple[int, Ask]] = []  # of a round that this rank has not reached, and who asks
        self._subscribers: dict[int, list[int]] = {}  # ranks that are told a set's calls
        self._told: list[tuple[int, Told]] = []
        self._stopping = threading.Event()
        self._listener = threading.Thread(target=self._listen, name="horovod-join", daemon=True)
        if comm.size > 1:
            self._listener.start()
        atexit.register(self._stop)  # nothing may run while the interpreter goes down

    def _stop(self) -> None:
        if self._listener.is_alive():  # not in a fork's child
            self._stopping.set()
            self._listener.join()

    def end(self) -> None:
        """Leave. What this rank has sent still arrives."""
        atexit.unregister(self._stop)
        self._stop()
        with suppress(DDLError):  # the job may be broken
            self._send_all(Left())
            self._messages.flush()  # else those who await them would hear of the end of the job first
        with suppress(StateError):  # the job is left already, or something is still awaited
            self._comm.free()

    # ---- What is told --------------------------------------------------------------------------------------------

    def add_set(self, number: int, ranks: Sequence[int]) -> None:
        """Answer for calls of a set that this rank is in."""
        self._sets[number] = ranks

    def forget_set(self, number: int) -> None:
        """Answer for it no longer."""
        self._sets.pop(number, None)

    def listener(self, key: Key) -> Listener:
        """What a group is made with."""
        return partial(self._made, key)

    def add_group(self, key: Key, group: LoggedGroup) -> None:
        """Tell of its calls."""
        self._groups[key] = group

    def forget_group(self, key: Key) -> None:
        """Tell of its calls no longer."""
        self._groups.pop(key, None)

    def _made(self, key: Key, number: int, call: Call) -> None:
        with self._lock:
            self._calls[key] = number + 1
            for rank in self._subscribers.get(key[0], ()):
                self._messages.send(rank, Told(key, number, call))

    # ---- Listening -----------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        with suppress(DDLError):  # what ends the messages ends the calls, too, which say so
            while not self._stopping.wait(_PERIOD):
                while self._hear():
                    pass

    def _hear(self) -> bool:
        """Heed a message, where one is here."""
        with self._lock:
            heard = self._messages.receive()
            if heard is None:
                return False
            rank, message = heard
            if isinstance(message, Left):
                self._left.add(rank)
            elif isinstance(message, Joined):
                self._joined[message.round, rank] = message
            elif isinstance(message, Told):
                self._told.append((rank, message))
            elif isinstance(message, Ask):
                self._heed(rank, message)
        return True

    def _send_all(self, message: object) -> None:
        for rank in range(self._comm.size):
            if rank != self._comm.rank:
                self._messages.send(rank, message)

    def _heed(self, rank: int, ask: Ask) -> None:
        if ask.round > self._round:
            self._asks.append((rank, ask))
        if ask.round != self._round:
            return
        for index, calls in self._of_set(ask.set_number).items():
            key, first = (ask.set_number, index), ask.calls.get(index, 0)
            group = self._groups.get(key)
            missed = group.calls.since(first) if group is not None else [(first, _ENDED)] if calls > first else []
            for number, call in missed:
                self._messages.send(rank, Told(key, number, call))
        if not self._has_joined:
            self._subscribers.setdefault(ask.set_number, []).append(rank)

    # ---- Joining -------------------------------------------------------------------------------------------------

    def join(self, device: int) -> int:
        """Make the others' calls until every rank has joined; returns the one that was the last.

        `device`: where tensors are made for calls that work on a GPU; below 0 the current one. Raises DDLError.
        """
        with self._lock:
            self._has_joined = True
            self._subscribers.clear()  # who is told by this rank now asks another
            mine = Joined(self._round, dict(self._calls), time.time_ns())
            self._joined[self._round, self._comm.rank] = mine
            self._send_all(mine)
        self._follow(device)
        barrier(comm=self._comm)  # nobody may make further calls, or leave, while another still asks
        return self._end_round()

    def _follow(self, device: int) -> None:
        asked: set[tuple[int, int]] = set()
        works: list[Work] = []
        nap, checked = _SHORTEST_NAP, time.monotonic()
        while True:
            heard = self._hear()
            works = _in_flight(works) + self._answers(device)
            missing = self._missing(range(self._comm.size))
            tellers = self._tellers()
            if not missing and not tellers:
                break
            for rank in self._left.intersection(missing):
                raise ShutdownError(f"join(): rank {rank} has called shutdown(), and not join() as {self._me} has")
            with self._lock:
                for number, teller in tellers:
                    if (number, teller) not in asked:
                        asked.add((number, teller))
                        self._messages.send(teller, Ask(self._round, number, self._of_set(number)))
            if time.monotonic() - checked > _LOSS_PERIOD:
                checked = time.monotonic()
                for rank in missing:
                    self._messages.check(rank)
            nap = _SHORTEST_NAP if heard else min(2 * nap, _LONGEST_NAP)
            if not heard:
                time.sleep(nap)
        for work in works:
            work.wait()

    def _missing(self, ranks: Sequence[int]) -> list[int]:
        """Those that have not joined."""
        return [rank for rank in ranks if (self._round, rank) not in self._joined]

    def _tellers(self) -> list[tuple[int, int]]:
        """Each set whose calls this rank lacks, or may lack, and the rank that tells them.

        That is the first which has not joined; where all have, one that had made more calls than this one has now.
        """
        tellers = []
        for number, ranks in self._sets.items():
            mine = self._of_set(number)
            candidates = self._missing(ranks) or [
                rank
                for rank in ranks
                if any(
                    its > mine.get(index, 0)
                    for (set_number, index), its in self._joined[self._round, rank].calls.items()
                    if set_number == number
                )
            ]
            tellers += [(number, rank) for rank in candidates[:1]]
        return tellers

    def _of_set(self, number: int) -> dict[int, int]:
        """Calls that this rank has made, by group."""
        return {index: calls for (its, index), calls in self._calls.items() if its == number}

    def _answers(self, device: int) -> list[Work]:
        """Make the calls that were told."""
        with self._lock:
            told, self._told = self._told, []
        works = [self._answer(rank, word, device) for rank, word in told]
        return [work for work in works if work is not None]

    def _answer(self, teller: int, told: Told, device: int) -> Work | None:
        group, call = self._groups.get(told.key), told.call
        made = self._calls.get(told.key, 0)
        if told.number < made:  # two tellers told it
            return None
        if group is None:
            raise StateError(
                f"join(): rank {teller} called {call.name} in a group that {self._me} has ended: keep optimizers and "
                "process sets until every rank has joined"
            )
        if call.op is None or call.name != "allreduce":
            hint = "; sparse gradients need sparse_as_dense=True" if call.name == "allgather" else ""
            raise UnsupportedError(
                f"join(): rank {teller} called {call.name} after {self._me} had joined, but until all have joined only "
                f"allreduce, and an optimizer's steps, go on without it{hint}"
            )
        if told.number > made:
            raise StateError(
                f"join(): rank {teller} was {told.number - made} more calls ahead of {self._me} than it remembers: "
                "call synchronize() more often"
            )
        options = dist.AllreduceOptions()
        options.reduceOp = ReduceOp(of_torch(call.op))
        where = torch.device("cpu")
        if call.on_gpu:
            where = torch.device("cuda", device if device >= 0 else torch.cuda.current_device())
        return group.allreduce(call.neutral(where), options)

    def _end_round(self) -> int:
        with self._lock:
            ended, self._round = self._round, self._round + 1
            self._has_joined = False
            self._told.clear()  # by two tellers
            every = {rank: self._joined.pop((ended, rank)) for rank in range(self._comm.size)}
            asks, self._asks = self._asks, []
            for rank, ask in asks:
                self._heed(rank, ask)
        # Who had made more calls than another joined after it; only clocks tell those apart that had made as many.
        return max(every, key=lambda rank: (_of_all(every[rank].calls), every[rank].time, rank))

    @property
    def _me(self) -> str:
        return f"rank {self._comm.rank}"


def _of_all(calls: Mapping[Key, int]) -> int:
    """Calls in the set of all ranks."""
    return sum(its for (set_number, _), its in calls.items() if set_number == 0)


def _in_flight(works: Sequence[Work]) -> list[Work]:
    """Those that go on. Raises the error that ended one."""
    left = [work for work in works if not work.is_completed()]
    for work in works:
        if work not in left:
            work.wait()
    return left
