"""Collectives in flight, as torch.distributed knows them, and the threads that see to those nobody waits for."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddl import job
from ddl.errors import DDLError, RankTimeoutError
from ddl.request import Request
from ddl.torch.streams import Order

_SHORTEST_NAP = 20e-6  # seconds between two looks at requests
_LONGEST_NAP = 1e-3


def explained(error: DDLError, name: str, parts: str) -> DDLError:
    """The error of a call that is made of several calls of libddl: names it first, then the part that failed."""
    return type(error)(f"{name}, which is made of {parts}s here: {error}")


class Work(dist.Work):
    """One call of torch.distributed: its requests to libddl, and the step that finishes it."""

    def __init__(
        self,
        name: str,
        requests: Sequence[Request[Any]],
        results: list[Tensor],
        finish: Callable[[], None] | None,
        reaper: Reaper,
        source: Callable[[], int] | None = None,
        order: Order | None = None,
        parts: str = "",
    ) -> None:
        super().__init__()
        self._parts = parts
        self._name = name
        self.requests = requests  #: to libddl; none once the call is over
        self._results = results
        self.finish = finish  #: the step that finishes it; None if there is none, or it was run
        self._reaper = reaper
        self._source = source
        self.order = order  #: its place in the order of a GPU's stream; None if its tensors are in host memory
        self._lock = threading.Lock()
        self._done = not requests and finish is None
        self._error: Exception | None = None
        self._future: torch.futures.Future[list[Tensor]] | None = None
        self._reaped = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Block until the results are there; `timeout` 0 is the group's. Raises the error that ended the call."""
        limit = timeout.total_seconds()
        if limit > 0 and not self._done:
            self._await(limit)
        self.settle()
        if self._error is not None:
            raise self._error
        if self.order is not None:
            self.order.follow()
        return True

    def _await(self, limit: float) -> None:
        deadline = time.monotonic() + limit
        nap = _SHORTEST_NAP
        while not self.test():
            if time.monotonic() > deadline:
                raise RankTimeoutError(
                    f"{self._name} was not finished {limit:g} s after it was waited for: the ranks that it waits for "
                    "are named in a warning after 10 s, and in an error after the group's timeout"
                )
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP)

    def test(self) -> bool:
        """Whether `settle` would return at once."""
        return self._done or all(request.test() for request in self.requests)

    def settle(self) -> None:
        """As `end`; then complete the future, whose callbacks run on this thread. Raises nothing."""
        self.end()
        with self._lock:
            future, self._future = self._future, None
        if future is not None:
            self._complete(future)

    def end(self) -> None:
        """Block until the call has succeeded or failed, and copy the results to where they belong. Raises nothing."""
        error: Exception | None = None
        if not self._done:
            for request in self.requests:
                try:
                    request.wait()
                except DDLError as its:  # the others end soon, too: their communicator is broken
                    error = error or (explained(its, self._name, self._parts) if self._parts else its)
        with self._lock:
            if not self._done:
                if error is None and self.finish is not None:
                    try:
                        self.finish() if self.order is None else self.order.finish(self.finish)
                    except Exception as its:
                        error = its
                self._error = error
                self.finish = None
                self.requests = ()
                self._done = True

    def _complete(self, future: torch.futures.Future[list[Tensor]]) -> None:
        if self.order is None:
            future.set_result(self._results)
        else:
            self.order.run(lambda: future.set_result(self._results))

    def _result_or_raise(self, done: torch.futures.Future[list[Tensor]]) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self._results

    def reap(self) -> None:
        """Let the reaper settle it, and keep it alive until then."""
        with self._lock:
            if self._reaped or self._done:
                return
            self._reaped = True
        self._reaper.add(self)

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A new future of the results (a list of tensors). It completes even if nobody waits for the call."""
        devices: list[int | str | torch.device] | None = None if self.order is None else [self.order.device]
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=devices)
        with self._lock:
            waits = not self._done
            if waits and self._future is None:
                self._future = future
            elif waits:
                # A second one follows the first.
                first = self._future
                assert first is not None
                first.add_done_callback(lambda _: self._complete(future))
        # Its set_exception() stores a result that only Python takes for an error: DistributedDataParallel would read
        # tensors out of it, and crash. What a callback raises is an error for all.
        result = future.then(self._result_or_raise)
        if waits:
            self.reap()
        else:
            self._complete(future)
        return result

    def is_completed(self) -> bool:
        """Whether the call has succeeded or failed."""
        if not self._done and self.test():
            self.settle()
        return self._done

    def is_success(self) -> bool:
        """Whether the call has succeeded."""
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        """The error that ended the call; None while it runs, or if it succeeded."""
        return self._error if self.is_completed() else None

    def result(self) -> list[Tensor]:
        """The output tensors."""
        return self._results

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    block_current_stream = synchronize

    def source_rank(self) -> int:
        """The rank in the group that a message came from. Raises RuntimeError: it is no receive."""
        if self._source is None:
            raise RuntimeError(f"{self._name} has no source rank: only receives have one")
        self.wait()
        return self._source()

    _source_rank = source_rank


_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_reapers: weakref.WeakSet[Reaper] = weakref.WeakSet()


@atexit.register
def _end_threads() -> None:
    """End the threads: none may touch a future while the interpreter shuts down."""
    if _threads:
        job.finalize()  # ends what is in flight
    for reaper in list(_reapers):
        reaper.stop()
    while threads := [thread for thread in list(_threads) if thread.is_alive()]:  # one may begin another
        for thread in threads:
            thread.join()


def _forget_threads() -> None:
    """In a forked child: it has none of the threads, and their locks may stay held for ever."""
    _threads.clear()
    _reapers.clear()


os.register_at_fork(after_in_child=_forget_threads)


class Reaper:
    """Threads that settle works: in order, or, with `any_order`, as they finish.

    Finishing a work may take long: a callback of its future may wait for another work. So one thread at a time waits
    for works; before it runs callbacks it leaves the waiting to another thread.
    """

    def __init__(self, name: str, *, any_order: bool) -> None:
        self._name = name
        self._next = self._next_that_ends if any_order else self._next_in_order
        self._turn = threading.Lock()  # of the thread that waits for works
        self._changed = threading.Condition()  # guards the rest
        self._works: list[Work] = []
        self._free = 0  # threads that run no callbacks
        self._stopping = False
        _reapers.add(self)

    def add(self, work: Work) -> None:
        """Settle this work when it is over."""
        with self._changed:
            self._works.append(work)
            self._changed.notify_all()
            self._need_thread()

    def stop(self) -> None:
        """End the threads once the works that they have are over."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def _need_thread(self) -> None:
        """With the lock held."""
        if self._works and self._free == 0:
            thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            _threads.add(thread)
            thread.start()
            self._free = 1

    def _serve(self) -> None:
        while True:
            with self._turn:
                work = self._next()
            with self._changed:
                if work is None and self._works:  # it came just now
                    continue
                self._free -= 1
                if work is None:
                    return
                with suppress(RuntimeError):  # no more threads can be started: then the others wait
                    self._need_thread()
            work.settle()
            del work
            with self._changed:
                if self._free > 1:  # enough, until the next callback that takes long
                    return
                self._free += 1

    def _next_in_order(self) -> Work | None:
        """The first work, once it is over; None: there is none, and stop() was called."""
        with self._changed:
            self._changed.wait_for(lambda: self._works or self._stopping)
            if not self._works:
                return None
            work = self._works.pop(0)
        work.end()
        return work

    def _next_that_ends(self) -> Work | None:
        """The first work that is over; None as in `_next_in_order`."""
        nap, known = _SHORTEST_NAP, 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._works or self._stopping)
                if not self._works:
                    return None
                works = list(self._works)
            work = next((work for work in works if work.test()), None)
            with self._changed:
                if work is not None:
                    self._works.remove(work)
                    return work
                nap = _SHORTEST_NAP if len(works) > known else min(2 * nap, _LONGEST_NAP)
                known = len(works)
                if len(self._works) == known:
                    self._changed.wait(nap)
