"""Calls in flight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from ddl.frontends.core.negotiation import Call

ResultT = TypeVar("ResultT")
OtherT = TypeVar("OtherT")


class Handle(Generic[ResultT]):
    """A call in flight, which `synchronize` ends. Leave its tensors alone until then."""

    def __init__(self, call: Call, result: Callable[[], ResultT]) -> None:
        self._call = call
        self._finish: Callable[[], ResultT] | None = result
        self._result: ResultT | None = None

    def poll(self) -> bool:
        """Whether `wait` would return at once."""
        return self._call.is_over

    def __call__(self) -> ResultT:
        """As `wait`: Horovod's sparse_allreduce_async returns a function to call."""
        return self.wait()

    def wait(self) -> ResultT:
        """Block until the call is over; returns its result, each time. Raises DDLError."""
        self._call.wait()
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        return self._result  # type: ignore[return-value]  # it may be None itself

    def then(self, step: Callable[[ResultT], OtherT]) -> Handle[OtherT]:
        """The same call, with `step` applied to its result."""
        return Handle(self._call, lambda: step(self.wait()))

    def in_background(self) -> Handle[ResultT]:
        """Have the call begin as soon as every rank has made it, even if nobody waits for it; returns itself."""
        self._call.in_background()
        return self


def poll(handle: Handle[ResultT]) -> bool:
    """Whether a call is over: then `synchronize` returns at once."""
    return handle.poll()


def synchronize(handle: Handle[ResultT]) -> ResultT:
    """Block until a call is over, and return its result. Raises the HorovodInternalError that ended it."""
    return handle.wait()
