"""Groups of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, c_int, c_void_p
from operator import index
from types import TracebackType
from typing import SupportsIndex

from ddl import library
from ddl.errors import ArgumentError, StateError

_NULL = c_void_p(-1).value  # DDL_COMM_NULL


class Communicator:
    """A group of ranks, in which collectives run beside those of others. Made by `split`; `free` it, or `with` it.

    That of a rank which joined no group is false, has rank -1 and size 0, and every call that it is passed to raises
    ArgumentError.
    """

    def __init__(self, handle: int | None) -> None:
        self._handle = handle
        self._freed = False
        null = handle == _NULL
        self.rank = -1 if null else library.number("ddl_rank", handle)  #: this process's number in the group, from 0
        self.size = 0 if null else library.number("ddl_size", handle)  #: how many ranks it has

    def __bool__(self) -> bool:
        """Whether this rank is part of the group."""
        return self._handle != _NULL

    @property
    def handle(self) -> int | None:
        """What the library knows it by; None is the group of all ranks. Raises StateError: it was freed."""
        if self._freed:
            raise StateError("this communicator was freed: make another with ddl.split")
        return self._handle

    @property
    def is_freed(self) -> bool:
        """Whether `free` was called, and did it."""
        return self._freed

    def set_timeout(self, seconds: float) -> None:
        """Bound how long calls that are made from now on wait for a rank. Not collective."""
        library.call("ddl_comm_set_timeout", self.handle, seconds)

    def free(self) -> None:
        """Free it; not collective. Raises StateError while it has requests in flight."""
        if self and not self._freed:
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
        if not self:
            return "<ddl.Communicator: none>"
        return f"<ddl.Communicator: rank {self.rank} of {self.size}{', freed' if self._freed else ''}>"


def split(color: int | None, key: int = 0, *, comm: Communicator | None = None) -> Communicator:
    """Part `comm` (None: all ranks): those with equal `color` get a communicator together, ordered by (key, rank).

    Collective; blocks. With `color` None, or below 0, this rank joins none: what it gets is false, and raises
    ArgumentError wherever it is used (it is not None, which would be all ranks). Raises ArgumentError, StateError,
    UnsupportedError (some thousand communicators exist already), and what collectives raise.
    """
    color_number = -1 if color is None else number_of(color, "color")
    made = c_void_p()
    library.call("ddl_comm_split", handle_of(comm), color_number, number_of(key, "key"), byref(made))
    return Communicator(made.value)


def create_group(ranks: Sequence[int], tag: int = 0) -> Communicator:
    """A communicator of some of all ranks, in this order, which they alone call, with the same list; blocks.

    Calls by the same ranks that are under way at once, on several threads, have a `tag` each. Raises ArgumentError (a
    rank that there is not, or this one is not among them), UnsupportedError (some thousand communicators exist
    already), and what collectives raise.
    """
    numbers = [number_of(rank, "a rank") for rank in ranks]
    made = c_void_p()
    library.call("ddl_comm_create_group", (c_int * len(numbers))(*numbers), len(numbers), tag, byref(made))
    return Communicator(made.value)


def handle_of(comm: Communicator | None) -> int | None:
    """A communicator as the library takes it. Raises ArgumentError: it is none."""
    if comm is None:
        return None
    if not isinstance(comm, Communicator):
        raise ArgumentError(f"comm is {comm!r}: expected a communicator of ddl.split or ddl.create_group, or None")
    return comm.handle


def number_of(value: SupportsIndex, name: str) -> int:
    """The argument `name` as a C int. Raises ArgumentError: it is none."""
    try:
        number = index(value)
    except TypeError:
        raise ArgumentError(f"{name} is {value!r}, but must be a whole number") from None
    if not -(2**31) <= number < 2**31:
        raise ArgumentError(f"{name} is {number}, but must be a number of 32 bits")
    return number
