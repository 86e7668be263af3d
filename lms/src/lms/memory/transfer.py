"""Copies that run beside the computation: one queue for each direction, worked off by a thread if there is no GPU.

Framework-free: bytes are named by their addresses. The engines in `lms.torch` make tensors of them.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from time import perf_counter
from typing import Protocol

from lms.core import items
from lms.core.link import Link
from lms.errors import LMSError, SpillError, afresh
from lms.memory.file import FileSlab, Place
from lms.memory.meter import Meter, measured_link
from lms.memory.slab import round_up
from lms.memory.slots import Ledger, Slot


class Copy(items.Copy, Protocol):
    """One copy in flight, and when its bytes moved."""

    nbytes: int

    @property
    def keep(self) -> object:
        """The memory that it reads or fills, until it is done; for good if it failed."""

    @property
    def span(self) -> tuple[float, float] | None:
        """When its bytes moved, by `time.perf_counter`; None while they do, if none did, and on a stream."""


class ThreadCopy:
    """A copy that a lane's thread carries out. `keep` stays alive meanwhile.

    `keep` is let go of, by the lane's thread, just before the copy counts as done. A copy that failed keeps it: the
    bytes may be nowhere else.
    """

    __slots__ = ("_gate", "_meter", "_over", "_pid", "failed", "job", "keep", "nbytes", "queue", "span")

    def __init__(self, nbytes: int, meter: Meter, keep: object = None) -> None:
        self.nbytes = nbytes
        self.keep = keep
        self.failed: LMSError | None = None
        self.span: tuple[float, float] | None = None
        self.queue: Queue | None = None  # of the lane that it was handed to
        self.job: Job | None = None  # until the lane begins
        self._meter = meter
        self._over = False
        self._pid = os.getpid()
        self._gate = threading.Lock()  # held until the copy is over: a tenth of the price of an Event
        self._gate.acquire()

    def done(self) -> bool:
        """Whether it is over, failed copies included."""
        return self._over

    def wait(self) -> None:
        """Block until the copy is over. Raises its error if it failed."""
        if not self._over:
            start = perf_counter()
            self.join()
            self._meter.stalled += perf_counter() - start
        if self.failed is not None:
            raise afresh(self.failed)

    synchronize = wait  # this thread is the one that computes

    def join(self) -> None:
        """Block until the copy is over, and count it as no stall. Raises SpillError in a forked child."""
        if not self._over:
            if os.getpid() != self._pid:
                raise SpillError(
                    "a copy was in flight when this process was forked, and only the parent sees it end; "
                    "use tensors that LMS manages in the process that trains"
                )
            if self.queue is not None:
                self.queue.hurry(self)
            with self._gate:
                pass

    def finish(self, failed: LMSError | None = None) -> None:
        """End the copy; to be called once, by the code that carries it out."""
        if failed is None:
            self.keep = None
        self.failed = failed
        self._over = True
        self._gate.release()


Job = tuple[Callable[[ThreadCopy], object], Callable[[], object]]


class Queue:
    """Copies that wait for their lane. They begin in order, but those that a thread waits for begin first.

    Any thread may put a copy in, one thread takes them out. There is no lock: the collector may interrupt any of these
    methods and end an engine, which puts in its last job.
    """

    def __init__(self) -> None:
        self._tickets: SimpleQueue[None] = SimpleQueue()  # one for each copy
        self._ordered: deque[ThreadCopy | None] = deque()
        self._hurried: deque[ThreadCopy] = deque()  # they stand in `_ordered` too

    def put(self, copy: ThreadCopy | None) -> None:
        """Add a copy at the end; None ends the lane."""
        self._ordered.append(copy)
        self._tickets.put(None)

    def hurry(self, copy: ThreadCopy) -> None:
        """A thread waits for the copy, so it overtakes those that no thread waits for."""
        if copy.job is not None:
            self._hurried.append(copy)

    def take(self) -> ThreadCopy | None:
        """The copy that is next. Blocks until there is one."""
        self._tickets.get()
        ordered = self._ordered
        while (first := ordered[0]) is not None and first.job is None:
            ordered.popleft()  # it was hurried
        while self._hurried:
            if (copy := self._hurried.popleft()).job is not None:
                return copy
        return ordered.popleft()


class Lane:
    """One direction of a link: a daemon thread that carries out what its queue holds."""

    def __init__(self, name: str) -> None:
        self.meter = Meter()
        self._queue = Queue()
        self._thread = threading.Thread(target=_carry_out, args=(self._queue,), name=name, daemon=True)
        self._thread.start()

    def submit(self, copy: ThreadCopy, work: Callable[[ThreadCopy], object], after: Callable[[], object]) -> None:
        """Queue `work`, which is called with the copy. If it raises an LMSError, the copy has failed of that.

        `after` is called in either case, before the copy is done.
        """
        copy.queue, copy.job = self._queue, (work, after)
        self._queue.put(copy)

    def stop(self) -> None:
        """Let the thread end after what is queued."""
        self._queue.put(None)

    def join(self) -> None:
        """Wait for the thread's end."""
        self._thread.join()

    def moved(self, copy: ThreadCopy, began: float) -> None:
        """Note that `copy` moved its bytes from the time `began` until now."""
        copy.span = began, perf_counter()
        self.meter.add(copy.nbytes, copy.span[1] - began)


def _carry_out(queue: Queue) -> None:
    # A function and not a method: the thread ends with its engine, so it must not keep the engine alive.
    while (copy := queue.take()) is not None:
        assert copy.job is not None
        (work, after), copy.job = copy.job, None
        failed: LMSError | None = None
        try:
            try:
                work(copy)
            finally:
                del work  # it may hold what the copy keeps
                after()
        except LMSError as error:
            failed = error
        except BaseException as error:  # this thread must go on, or others would wait forever
            failed = SpillError(f"a copy of {copy.nbytes} bytes failed: {error!r}; please report it")
            failed.__cause__ = error
        copy.finish(failed)
        del copy, after, failed


class Memory:
    """The upper end of a copy: host memory at `address`. A subclass puts a stage between, and blocks for it."""

    def __init__(self, address: int) -> None:
        self.address = address

    def fill(self, start: int, stop: int) -> int:
        """The address at which bytes `start` to `stop` can be read now."""
        return self.address + start

    def room(self, start: int, stop: int) -> int:
        """The address, a page's start less the skew, to which bytes `start` to `stop` may be written."""
        return self.address + start

    def drain(self, start: int, stop: int) -> None:
        """Bytes `start` to `stop` are at the address that `room` gave."""


class FileSlot(Slot):
    """A slot in the slab file: one place, or one for each stage's worth of bytes."""

    __slots__ = ("places", "written")

    def __init__(self, nbytes: int, places: tuple[Place, ...]) -> None:
        super().__init__(nbytes)
        self.places = places
        self.written: ThreadCopy | None = None


class FileEngine:
    """Copies between memory and a slab file, by one thread a direction.

    Calls may come from any thread. A forked child has no copying threads: nothing can be copied there, and `close` and
    `discard` do nothing. An engine that is forgotten ends its threads when it is collected; none of them keeps the
    interpreter from exiting.
    """

    def __init__(self, file: FileSlab) -> None:
        self.file = file
        self.out = Lane("lms-out")
        self.back = Lane("lms-back")
        self._slots: Ledger[FileSlot] = Ledger(partial(_free, file))
        self._pid = os.getpid()
        self._closed = False
        self._end = weakref.finalize(self, _end, self._pid, self.out, self.back, file)
        self._end.atexit = False  # at exit the kernel ends the threads and closes the file; nothing to wait for

    def write(
        self, memory: Memory, nbytes: int, *, skew: int = 0, chunk: int = 0, keep: object = None
    ) -> tuple[FileSlot, ThreadCopy]:
        """Start a copy of `nbytes` out of `memory`, in pieces of `chunk` bytes when it is given.

        `skew` is the memory's address modulo the page's size. Raises SpillError after close and in a forked child.
        """
        self._check()
        file, total = self.file, max(nbytes, 1)
        with self._slots.lock:
            self._slots.count()
            places = tuple(
                file.allocate(min(chunk or nbytes, nbytes - start), skew) for start in range(0, total, chunk or total)
            )
        slot = FileSlot(nbytes, places)
        slot.users = 2
        lane = self.out
        slot.written = copy = ThreadCopy(nbytes, lane.meter, keep)

        def work(copy: ThreadCopy) -> None:
            if slot.dropped and slot.users == 1:  # no read will come; a read that was asked for is a user too
                return
            began, start = perf_counter(), 0
            for place in places:
                file.write(place, memory.fill(start, start + place.nbytes))
                start += place.nbytes
            lane.moved(copy, began)

        lane.submit(copy, work, partial(self._slots.leave, slot))
        return slot, copy

    def read(self, slot: FileSlot, memory: Memory, *, keep: object = None) -> ThreadCopy:
        """Start a copy of the slot's bytes into `memory`, behind the write that fills the slot.

        If the write failed, the copy fails of the same error. Raises SpillError after close and in a forked child, and
        ValueError for a slot that was discarded.
        """
        self._check()
        with self._slots.lock:
            self._slots.use(slot)
        lane = self.back
        copy = ThreadCopy(slot.nbytes, lane.meter, keep)
        file, written = self.file, slot.written

        def work(copy: ThreadCopy) -> None:
            if written is not None:
                written.join()
                if written.failed is not None:
                    raise afresh(written.failed)
            began, start = perf_counter(), 0
            for place in slot.places:
                stop = start + place.nbytes
                file.read(place, memory.room(start, stop) - place.skew)
                memory.drain(start, stop)
                start = stop
            lane.moved(copy, began)

        lane.submit(copy, work, partial(self._slots.leave, slot))
        return copy

    def reserve(self, nbytes: int) -> Place:
        """Room in the file for whole pages that other code copies, for good."""
        self._check()
        with self._slots.lock:
            return self.file.allocate(round_up(nbytes), 0)

    def discard(self, slot: Slot) -> None:
        """Give the slot's room back, once its copies have ended. Never blocks. Idempotent."""
        assert isinstance(slot, FileSlot)
        if os.getpid() == self._pid:
            self._slots.drop(slot)

    def usage(self) -> dict[str, int]:
        """Bytes in the file now and at most, rounded up to pages: `file` and `file_peak`."""
        self._slots.settle()
        return {"file": self.file.slab.used, "file_peak": self.file.slab.peak}

    def link(self) -> Link | None:
        """Bandwidth and latency of the copies so far; None before any."""
        return measured_link("file", self.out.meter, self.back.meter)

    def stalled(self) -> tuple[float, float]:
        """Seconds that threads have waited for copies out, and for copies back."""
        return self.out.meter.stalled, self.back.meter.stalled

    def close(self) -> None:
        """Wait for the copies, end the threads, close the file. Idempotent; does nothing in a forked child."""
        if not self._closed and os.getpid() == self._pid:
            self._closed = True
            self._end()
            self.back.join()

    def _check(self) -> None:
        if self._closed:
            raise SpillError("the engine is closed: its session has ended")
        if os.getpid() != self._pid:
            raise SpillError(
                "this process was forked from one that uses LMS, and the copying threads stayed there; "
                "start a session of its own in this process"
            )


def _free(file: FileSlab, slot: FileSlot) -> None:
    for place in slot.places:
        file.free(place)


def _end(pid: int, out: Lane, back: Lane, file: FileSlab) -> None:
    if os.getpid() != pid:
        return

    def close(_: ThreadCopy) -> None:
        out.join()
        file.close()

    out.stop()
    back.submit(ThreadCopy(0, back.meter), close, int)  # behind the last read, and by then behind the last write
    back.stop()
