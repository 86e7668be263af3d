"""Negotiation: ranks agree on their next calls, on the order, and on the arguments.

In a round each rank announces the calls that it has made since the last round. Calls that all ranks have announced
begin, in one order. While a call waits for a rank, every rank takes part in further rounds, even with nothing to say.
If no call waits, a round begins when each rank has a call.

A thread that waits for a call drives the rounds. If none waits, a background thread does.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ddl import job
from ddl.errors import (
    ArgumentError,
    DDLError,
    MismatchError,
    PeerLostError,
    RankTimeoutError,
    ShutdownError,
    StateError,
    TransportError,
)
from ddl.frontends.core.announcements import JOIN, WITHDRAW, Announcement, Batch, Outcome, Table, size_of
from ddl.frontends.core.rounds import Rounds

_WARN_SECONDS = 10.0  # after which a late rank is named
_LONGEST_NAP = 1e-3  # seconds between two rounds in which no rank says anything
_MOST = 256  # calls that a rank announces in a round
_MOST_BYTES = 64 << 10  # of these announcements, which each rank may get from all others; a single call may be larger
_PAUSE = 0.01  # seconds between two attempts to leave

# Errors that the other ranks find by themselves. After any other error they would wait for a rank that never comes.
_COMMON = (MismatchError, RankTimeoutError, PeerLostError, ShutdownError, TransportError)


class Begun(Protocol):
    """A call in flight."""

    def wait(self) -> object:
        """Block until it is over. Raises the error that ended it."""

    def is_completed(self) -> bool:
        """Whether it is over, in whatever way."""


Start = Callable[[Mapping[int, Announcement], bool], Begun | None]


class Call:
    """A call that this rank has announced.

    `start` begins it. Its arguments are the announcements of all ranks, by rank, and whether it may block until the
    call is over. `on_failure` gets the error that ends the call before it begins.
    """

    def __init__(
        self,
        negotiator: Negotiator,
        announcement: Announcement,
        start: Start,
        on_failure: Callable[[Exception], None] | None = None,
    ) -> None:
        self.announcement = announcement
        self.begun = False  #: it was started, or has failed
        self.awaited = False
        self.since = time.monotonic()
        self.warned = self.withdrawn = False
        self._start = start
        self._on_failure = on_failure
        self._negotiator = negotiator
        self._work: Begun | None = None
        self._error: Exception | None = None

    def wait(self) -> None:
        """Block until it is over. Raises the error that ended it."""
        if not self.begun:
            self._negotiator.drive(self)
        if self._error is not None:
            raise self._error
        if self._work is not None:
            try:
                self._work.wait()
            finally:
                self._negotiator.forget(self)

    @property
    def is_over(self) -> bool:
        """Whether `wait` would return at once."""
        return self.begun and (self._work is None or self._work.is_completed())

    def in_background(self) -> None:
        """Have the call begin even if no thread waits for it."""
        if not self.begun:
            self._negotiator.attend()

    def begin(self, announced: Mapping[int, Announcement], *, may_block: bool = False) -> None:
        """Begin the call: every rank has announced it. An exception of `start` is raised here, and later by `wait`."""
        try:
            self._work = self._start(announced, self.awaited and may_block)
        except Exception as error:
            self.fail(error)
            raise
        self.begun = True

    def fail(self, error: Exception) -> None:
        """End the call with an error before it begins."""
        self._error = error
        self.begun = True
        if self._on_failure is not None:
            self._on_failure(error)


class Negotiator:
    """The negotiator of a set of ranks.

    `answer` begins, on a rank that has joined, a call that the others announced. `leave` frees the communicator of the
    calls; it returns False while a call is in flight.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rounds: Rounds,
        answer: Callable[[Announcement], Begun],
        leave: Callable[[], bool],
    ) -> None:
        self._rank = rounds.rank
        self._me = ranks[self._rank]
        self._rounds = rounds
        self._answer = answer
        self._leave = leave
        self._driving = threading.Lock()  # held by the driving thread; calls begin under it, and so in one order
        self._changed = threading.Condition()  # guards all below
        self._table = Table(ranks)
        self._queue: deque[Announcement] = deque()  # not announced yet
        self._calls: dict[str, Call] = {}  # by key: those that may be in flight
        self._announced = 0  # calls of this rank since the start, or since all ranks joined
        self._nameless = 0  # of them
        self._joining: Call | None = None  # between join() and the last rank's join()
        self._answers: list[Begun] = []
        self._last_to_join = 0
        self._nap = 0.0
        self._broken: DDLError | None = None
        self._attended = False  # the background thread drives
        self._leaving = False  # after an error that the other ranks do not know
        self._stopping = self._ended = False
        self._thread: threading.Thread | None = None
        self._timeout = job.timeout_or(300.0)
        _negotiators.add(self)

    # ---- Announcing ----------------------------------------------------------------------------------------------

    def announce(
        self,
        kind: str,
        name: str | None,
        start: Start,
        tensors: tuple[tuple[str, tuple[int, ...]], ...] = (),
        terms: str = "",
        per_rank: tuple[int, ...] = (),
        on_failure: Callable[[Exception], None] | None = None,
    ) -> Call:
        """Announce that this rank is ready for a call, which `start` begins. The arguments are those of Announcement.

        Calls with a `name` are matched by kind and name, calls without one by their order. Raises ArgumentError if a
        call of that name is in flight, and the DDLError that ended the negotiations.
        """
        with self._changed:
            if self._broken is not None:
                raise self._broken
            key = f"{kind} {name!r}" if name is not None else f"#{self._nameless}"
            if (former := self._calls.get(key)) is not None and not former.is_over:
                raise ArgumentError(
                    f"{key} is in flight already: a name stands for one call at a time, so synchronize the first, or "
                    "give this one another name"
                )
            self._nameless += name is None
            self._announced += 1
            announcement = Announcement(kind, key, tensors, terms, per_rank)
            call = self._calls[key] = Call(self, announcement, start, on_failure)
            self._queue.append(announcement)
        return call

    def join(self) -> Call:
        """Announce that this rank makes no calls until every rank has joined; the returned call then ends."""
        with self._changed:
            if self._broken is not None:
                raise self._broken
            self._joining = Call(self, Announcement(JOIN, JOIN, per_rank=(self._announced,)), lambda *_: None)
            self._queue.append(self._joining.announcement)
            return self._joining

    def joined(self) -> int:
        """After all ranks have joined: the last one. First waits for the calls that this rank answered meanwhile.

        Raises the error that ended one of them.
        """
        answers, self._answers = self._answers, []
        for answer in answers:
            answer.wait()
        return self._last_to_join

    # ---- Driving -------------------------------------------------------------------------------------------------

    def drive(self, call: Call) -> None:
        """Take part in rounds until a call has begun."""
        call.awaited = True
        try:
            with self._driving:
                while not call.begun:
                    self._step()
        finally:
            self._free_after_end()
        if self._queue or self._owes:
            self.attend()

    def attend(self) -> None:
        """Have the background thread drive until nothing is left to do."""
        with self._changed:
            self._attended = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="horovod-negotiator", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    @property
    def _owes(self) -> bool:
        """Whether the others need this rank in another round, even if it has no announcement."""
        return bool(self._table.waiting) or self._joining is not None

    def _serve(self) -> None:
        while True:
            with self._changed:
                if not self._queue and not self._owes:
                    self._attended = self._leaving
                self._changed.wait_for(lambda: self._stopping or self._attended)
            if self._stopping:
                self._free_after_end()
                return
            if self._leaving:
                # Freeing the communicators tells the others that this rank has left, so they do not wait for it.
                if not all([self._rounds.free(), self._leave()]) and job.is_initialized():
                    time.sleep(_PAUSE)
                    continue
                self._leaving = False
            with self._driving:
                if self._queue or self._owes:
                    self._step()

    def _step(self) -> None:
        """Take part in one round, and begin the calls that are ready. With `_driving` held."""
        try:
            self._take_part()
        except DDLError as error:
            self._break(error)
        except BaseException as error:
            # This rank may have missed an announcement or a call, so its next call could be matched with a wrong one.
            why = f"interrupted in a round of rank {self._me}: {type(error).__name__}"
            self._break(StateError(f"{why}: {error}" if str(error) else why))
            raise

    def _take_part(self) -> None:
        with self._changed:
            if not self._queue and self._nap > 0 and self._joining is None:
                self._changed.wait_for(lambda: self._stopping or bool(self._queue), self._nap)
            if self._stopping:
                raise StateError("the process set was removed, or shutdown() called, with a call in flight")
            mine = self._next_batch()
        said, put_off = self._rounds.take_part(mine)
        with self._changed:
            self._queue.extendleft(reversed(put_off))
            outcomes = self._table.take(said)
            last = self._table.last_to_join()
            heard = any(said)
            self._nap = 0.0 if heard else min(2 * self._nap + _LONGEST_NAP / 16, _LONGEST_NAP)
        for outcome in outcomes:
            try:
                self._carry_out(outcome, is_last=outcome is outcomes[-1])
            except DDLError:
                raise
            except Exception as error:
                its = next(iter(outcome.announced.values()))
                raise StateError(f"rank {self._me} could not begin {its}: {type(error).__name__}: {error}") from error
        if last is not None and self._joining is not None:
            joining, self._joining = self._joining, None
            self._last_to_join = last
            self._announced = self._nameless = 0  # the others made calls without this rank
            joining.begin({})
        if self._table.waiting:
            self._look_for_late_ranks()

    def _next_batch(self) -> Batch:
        """Take this rank's announcements for the next round from the queue. With `_changed` held."""
        batch: list[Announcement] = []
        left = _MOST_BYTES
        while self._queue and len(batch) < _MOST:
            comes_alone = self._queue[0].kind in (JOIN, WITHDRAW)
            left -= size_of(self._queue[0]) + len(", ")
            if batch and (comes_alone or left < len("[]")):
                break
            batch.append(self._queue.popleft())
            if comes_alone:
                break
        return tuple(batch)

    def _carry_out(self, outcome: Outcome, *, is_last: bool) -> None:
        """Begin a call, or end it. Every rank does so for the same outcomes in the same order.

        Only the last call of a round may block until it is over, so that no other waits to begin. Raises the error that
        kept this rank from beginning a call that the others have begun.
        """
        mine = outcome.announced.get(self._rank)
        if mine is not None:
            call = self._calls[outcome.key]
            if outcome.error is not None:
                call.fail(outcome.error)
            else:
                call.begin(outcome.announced, may_block=is_last)
            if mine.key.startswith("#") or call.is_over:
                self.forget(call)
        elif outcome.error is None and self._joining is not None:
            for answer in [its for its in self._answers if its.is_completed()]:
                answer.wait()  # raises the error that ended it
                self._answers.remove(answer)
            self._answers.append(self._answer(next(iter(outcome.announced.values()))))

    def forget(self, call: Call) -> None:
        """Forget a call that is over: its name is free again."""
        with self._changed:
            if self._calls.get(call.announcement.key) is call:
                del self._calls[call.announcement.key]

    def _break(self, error: DDLError) -> None:
        """End the negotiations with an error."""
        with self._changed:
            self._broken = error
            self._leaving = not isinstance(error, _COMMON) and not self._stopping
            self._queue.clear()
            self._table.waiting.clear()
            calls = [call for call in self._calls.values() if not call.begun]
            self._calls.clear()
            if self._joining is not None:
                calls.append(self._joining)
                self._joining = None
        for call in calls:
            words = f"rank {self._me} called {call.announcement}, which the ranks could not agree on: {error}"
            call.fail(type(error)(words))
        if self._leaving:
            self.attend()

    def _look_for_late_ranks(self) -> None:
        with self._changed:
            now = time.monotonic()
            for key in self._table.waiting:
                call = self._calls.get(key)
                if call is None or call.begun:
                    continue
                waited = now - call.since
                if waited >= self._timeout and not call.withdrawn:
                    call.withdrawn = True
                    self._queue.append(Announcement(WITHDRAW, key))
                elif waited >= _WARN_SECONDS and not call.warned:
                    call.warned = True
                    text = f"rank {self._me} has waited {waited:.0f} s in {call.announcement}"
                    print(f"ddl: {text}: {self._table.hindrance(key)}", file=sys.stderr, flush=True)

    # ---- The end -------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Take part in no further round. The others learn this now, or after the round in which this rank is."""
        self._ended = True
        self.stop()
        self._free_after_end()

    def _free_after_end(self) -> None:
        """Free the communicators of the rounds, unless a thread is in a round: then that thread frees them."""
        if self._ended and self._driving.acquire(blocking=False):
            try:
                self._rounds.free()
            finally:
                self._driving.release()

    def stop(self) -> threading.Thread | None:
        """Have the background thread end, after what it waits for is over."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            return self._thread


_negotiators: weakref.WeakSet[Negotiator] = weakref.WeakSet()


@atexit.register
def _end_threads() -> None:
    """No thread may run while the interpreter shuts down."""
    threads = [thread for its in list(_negotiators) if (thread := its.stop()) is not None]
    if any(thread.is_alive() for thread in threads):
        job.finalize()  # ends the calls in flight
    for thread in threads:
        thread.join()


os.register_at_fork(after_in_child=_negotiators.clear)  # a forked child has none of the threads
