"""What libddl asks of a store: how ranks that MPI did not start find one another (`ddl_membership` of ddl.h)."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_double, c_int, c_size_t, c_void_p
from operator import index
from typing import Protocol, cast

from ddl.errors import ArgumentError

_OK, _TIMEOUT, _FAILED = 0, 1, 2  # what the callbacks return
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.05  # seconds between two looks at a store

# What the launchers of Open MPI, of MPICH (Hydra), and of Slurm and others through PMIx set.
_OF_MPI = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")

_Set = CFUNCTYPE(c_int, c_void_p, c_char_p, c_void_p, c_size_t)
_Get = CFUNCTYPE(c_int, c_void_p, c_char_p, c_void_p, c_size_t, POINTER(c_size_t), c_double)


class Store(Protocol):
    """Where ranks leave messages for one another: a key has one value, which every rank sees.

    `get` returns the value; if there is none yet, it returns None or raises KeyError. If the store has
    `check(keys)`, as torch.distributed's stores do, `get` is called only when it says that the key is there.
    """

    def set(self, key: str, value: bytes, /) -> object:
        """Give the key this value."""

    def get(self, key: str, /) -> bytes | None:
        """The key's value."""


class _Struct(Structure):
    _fields_ = (("rank", c_int), ("size", c_int), ("context", c_void_p), ("set", _Set), ("get", _Get))


class Membership:
    """A store, with this process's place in the job, as libddl takes them.

    libddl calls the store in `ddl_init_with`, `ddl_join` and `ddl_waiting`, from any thread; ctypes takes the GIL for
    each call. An exception of the store cannot pass through C: it is kept in `error`, for the caller of the first two
    to raise. Raises ArgumentError.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        rank, size = index(rank), index(size)
        if not 0 <= rank < size < 2**31:
            raise ArgumentError(f"rank is {rank} and size is {size}: rank must be in [0, size)")
        for name in ("set", "get"):
            if not callable(getattr(store, name, None)):
                raise ArgumentError(f"store is {type(store).__name__}, which has no method {name}: see ddl.init")
        self.error: BaseException | None = None
        self._store = store
        # libddl gets the address of this: it has to live as long as the callbacks in it may be called.
        self._struct = _Struct(rank, size, None, _Set(self._set), _Get(self._get))

    @property
    def pointer(self) -> object:
        """The argument of `ddl_init_with`; valid as long as this object."""
        return ctypes.byref(self._struct)

    def _set(self, _: object, key: bytes, value: int | None, count: int) -> int:
        return self._guarded(lambda: self._put(key.decode(), ctypes.string_at(value, count) if value else b""))

    def _put(self, key: str, value: bytes) -> int:
        self._store.set(key, value)
        return _OK

    def _get(
        self, _: object, key: bytes, value: int, capacity: int, count: ctypes._Pointer[c_size_t], seconds: float
    ) -> int:
        return self._guarded(lambda: self._take(key.decode(), value, capacity, count, seconds))

    def _take(self, key: str, value: int, capacity: int, count: ctypes._Pointer[c_size_t], seconds: float) -> int:
        found = _value(self._store, key, seconds)
        if found is None:
            return _TIMEOUT
        if len(found) > capacity:
            raise ArgumentError(f"the store has {len(found)} bytes under {key!r}, but libddl wrote at most {capacity}")
        ctypes.memmove(value, found, len(found))
        count[0] = len(found)
        return _OK

    def _guarded(self, action: Callable[[], int]) -> int:
        try:
            return action()
        except BaseException as error:
            self.error = error
            return _FAILED


def _value(store: Store, key: str, seconds: float) -> bytes | None:
    """The key's value, or None if there is none within `seconds`. Raises what the store raises."""
    deadline = time.monotonic() + seconds
    # Not its `wait`: it warns of each time-out, and has no common exception for it.
    check = getattr(store, "check", None)
    pause = _FIRST_PAUSE
    while True:
        try:
            found = store.get(key) if check is None or check([key]) else None
        except KeyError:
            found = None
        if found is not None:
            return _bytes_of(found, key)
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        time.sleep(min(pause, left))
        pause = min(2 * pause, _LONGEST_PAUSE)


def _bytes_of(value: object, key: str) -> bytes:
    if not isinstance(value, bytes | bytearray | memoryview):
        raise ArgumentError(f"the store has a {type(value).__name__} under {key!r}: its get must return bytes")
    return bytes(value)


def under_mpi(environment: Mapping[str, str]) -> bool:
    """Whether MPI knows this process: DDL_TRANSPORT says so, or MPI's launcher started it.

    If MPI started a torchrun on each host, it knows the torchruns, and not the processes that they started.
    """
    transport = environment.get("DDL_TRANSPORT", "auto")
    if transport in ("mpi", "tcp"):
        return transport == "mpi"
    return "TORCHELASTIC_RUN_ID" not in environment and any(name in environment for name in _OF_MPI)


def from_torch() -> tuple[Store, int, int]:
    """A store of torch.distributed, this process's rank, and the number of ranks. Raises what PyTorch raises.

    They are those of the default process group, if the script has made it; else those of env://: under torchrun the
    store at MASTER_PORT is the agent's, and otherwise rank 0 makes it.
    """
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    if dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
        rank, size = dist.get_rank(), dist.get_world_size()
    else:
        store, rank, size = next(rendezvous("env://"))
    return cast("Store", PrefixStore("ddl.init", store)), rank, size  # its types know str alone
