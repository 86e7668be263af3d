"""Groups of ranks."""

from __future__ import annotations

from ctypes import byref, c_void_p
from types import TracebackType

from ddl import library
from ddl.errors import StateError


class Communicator:
    """A group of ranks, in which collectives run beside those of others. Made by `split`; `free` it, or `with` it."""

    def __init__(self, handle: int | None) -> None:
        self._handle = handle
        self._freed = False
        self.rank = library.number("ddl_rank", handle)  #: this process's number in the group, from 0
        self.size = library.number("ddl_size", handle)  #: how many ranks it has

    @property
    def handle(self) -> int | None:
        """What the library knows it by; None is the group of all ranks. Raises StateError: it was freed."""
        if self._freed:
            raise StateError("this communicator was freed: make another with ddl.split")
        return self._handle

    def free(self) -> None:
        """Free it; not collective. Raises StateError while it has requests in flight."""
        if not self._freed:
            library.call("ddl_comm_free", self._handle)
            self._freed = True

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # A request in flight, which an exception has left behind, would hide that exception.
        if error is None:
            self.free()

    def __repr__(self) -> str:
        return f"<ddl.Communicator: rank {self.rank} of {self.size}{', freed' if self._freed else ''}>"


def split(color: int | None, key: int = 0, *, comm: Communicator | None = None) -> Communicator | None:
    """Part `comm` (None: all ranks): those with equal `color` get a communicator together, ordered by (key, rank).

    Collective; blocks. With `color` None, or below 0, this rank joins none and gets None. Raises StateError,
    UnsupportedError (some thousand communicators exist already), and what collectives raise.
    """
    joins = color is not None and color >= 0
    made = c_void_p()
    library.call("ddl_comm_split", handle_of(comm), color if joins else -1, key, byref(made))
    return Communicator(made.value) if joins else None


def handle_of(comm: Communicator | None) -> int | None:
    """A communicator as the library takes it."""
    return None if comm is None else comm.handle
