"""Calls in flight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from ddl.torch.work import Work

ResultT = TypeVar("ResultT")


class Handle(Generic[ResultT]):
    """A call in flight, which `synchronize` ends. Leave its tensors alone until then."""

    def __init__(self, work: Work, result: Callable[[], ResultT]) -> None:
        self.work = work
        self._finish: Callable[[], ResultT] | None = result
        self._result: ResultT | None = None

    def poll(self) -> bool:
        """Whether `wait` would return at once."""
        return self.work.is_completed()

    def __call__(self) -> ResultT:
        """As `wait`: what Horovod's sparse_allreduce_async returns is called."""
        return self.wait()

    def wait(self) -> ResultT:
        """Block until the call is over; returns its result, however often it is asked for. Raises DDLError."""
        self.work.wait()
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        return self._result  # type: ignore[return-value]  # it may be None itself


def poll(handle: Handle[ResultT]) -> bool:
    """Whether a call is over: then `synchronize` returns at once."""
    return handle.poll()


def synchronize(handle: Handle[ResultT]) -> ResultT:
    """Block until a call is over, and return its result. Raises the DDLError that ended it."""
    return handle.wait()
