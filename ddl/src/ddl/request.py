"""Calls of the library: those to make, and those in flight."""

from __future__ import annotations

import threading
from ctypes import byref, c_int, c_void_p
from typing import Generic, NamedTuple, TypeVar

from ddl import library
from ddl.errors import ArgumentError, DDLError

ResultT = TypeVar("ResultT")

# Requests whose handle was dropped before they were finished: their buffers must outlive them.
_dropped: list[tuple[c_void_p, object]] = []
_sweeping = threading.Lock()  # one thread tests a request: the library frees it as soon as it is finished

# Buffers of collectives that failed: MPI cannot take back a message that it has begun to send, and may still read them.
_retained: list[object] = []


class Request(Generic[ResultT]):
    """A collective in flight. It keeps its buffers alive; leave their contents alone until it is finished."""

    def __init__(self, handle: c_void_p, result: ResultT, buffers: object) -> None:
        self._handle = handle
        self._result = result
        self._buffers = buffers
        self._finished = False
        self._error: DDLError | None = None
        self._lock = threading.Lock()

    def test(self) -> bool:
        """Whether the collective is finished, in whatever way: then `wait` returns, or raises, at once."""
        if not self._lock.acquire(blocking=False):
            return self._finished  # another thread waits for it
        try:
            if not self._finished:
                done = c_int()
                try:
                    library.call("ddl_test", byref(self._handle), byref(done))
                except DDLError as error:
                    self._end(error)
                else:
                    if done.value:
                        self._end(None)
            return self._finished
        finally:
            self._lock.release()

    def wait(self) -> ResultT:
        """Block until the collective is finished, and return its result. Raises the DDLError that ended it."""
        with self._lock:
            if not self._finished:
                try:
                    library.call("ddl_wait", byref(self._handle))
                except DDLError as error:
                    self._end(error)
                else:
                    self._end(None)
        if self._error is not None:
            raise self._error
        return self._result

    def _end(self, error: DDLError | None) -> None:
        if error is not None:
            retain(self._buffers)
        self._error = error
        self._buffers = None
        self._finished = True

    def __del__(self) -> None:
        """Hand the buffers to the list of those that nobody waits for."""
        if not self._finished:
            _dropped.append((self._handle, (self._result, self._buffers)))


class Call(NamedTuple, Generic[ResultT]):
    """A call of the library that is not made yet."""

    name: str  # without ddl_, and without the i of the asynchronous form
    arguments: tuple[object, ...]
    buffers: object  # they must live until the call is over
    result: ResultT

    def start(self) -> Request[ResultT]:
        """Start the call. Raises DDLError."""
        sweep()
        handle = c_void_p()
        library.call(f"ddl_i{self.name}", *self.arguments, byref(handle))
        return Request(handle, self.result, self.buffers)

    def run(self) -> ResultT:
        """Make the call, and block until it is over. Raises DDLError."""
        try:
            library.call(f"ddl_{self.name}", *self.arguments)
        except ArgumentError:  # nothing was started
            raise
        except DDLError:
            retain(self.buffers)
            raise
        return self.result


def retain(buffers: object) -> None:
    """Keep the buffers of a collective that failed until the process ends."""
    if buffers is not None:
        _retained.append(buffers)


def sweep() -> None:
    """Let go of the buffers of dropped requests that are finished by now."""
    if not _dropped or not _sweeping.acquire(blocking=False):
        return
    try:
        done = c_int()
        for entry in list(_dropped):
            try:
                library.call("ddl_test", byref(entry[0]), byref(done))
            except DDLError:  # nobody asks how it ended
                retain(entry[1])
                done.value = 1
            if done.value:
                _dropped.remove(entry)
    finally:
        _sweeping.release()
