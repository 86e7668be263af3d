"""Finds libddl.so, loads it when it is first needed, and declares its functions."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Iterator
from ctypes import POINTER, byref, c_char_p, c_double, c_int, c_int64, c_size_t, c_uint64, c_void_p
from pathlib import Path

from ddl.errors import LibraryError, error_of

NAME = "libddl.so"
PLUGIN = "libddl_mpi.so"  # beside it: adds MPI
DISTRIBUTION = "bascule-ddl"
VERSION = (0, 1)  # major and minor of the interface that this package is written for

# The functions of ddl.h, by the types of their arguments. All return a ddl_result.
_REDUCTION = [c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p]
_MOVEMENT = [c_void_p, c_void_p, c_size_t, c_int, c_void_p]
_BROADCAST = [c_void_p, c_size_t, c_int, c_int, c_void_p]
_MESSAGE = [c_void_p, c_size_t, c_int, c_int, c_int64, c_void_p]
_REQUEST = [POINTER(c_void_p)]
_FUNCTIONS = {
    "ddl_init": [c_char_p],
    "ddl_init_with": [c_void_p, c_char_p],  # a ddl_membership
    "ddl_finalize": [],
    "ddl_join": [c_void_p, c_char_p],
    "ddl_resize": [POINTER(c_int), c_int, POINTER(c_int), POINTER(c_int)],
    "ddl_shrink": [POINTER(c_int), c_int, POINTER(c_int)],
    "ddl_waiting": [POINTER(c_int)],
    "ddl_get_stats": [c_void_p],  # a ddl_stats
    "ddl_get_waits": [POINTER(c_double), POINTER(c_uint64), c_int],
    "ddl_epoch": [POINTER(c_uint64)],
    "ddl_rank": [c_void_p, POINTER(c_int)],
    "ddl_size": [c_void_p, POINTER(c_int)],
    "ddl_local_rank": [POINTER(c_int)],
    "ddl_local_size": [POINTER(c_int)],
    "ddl_num_hosts": [POINTER(c_int)],
    "ddl_comm_split": [c_void_p, c_int, c_int, POINTER(c_void_p)],
    "ddl_comm_create_group": [POINTER(c_int), c_int, c_uint64, POINTER(c_void_p)],
    "ddl_comm_set_timeout": [c_void_p, c_double],
    "ddl_comm_free": [c_void_p],
    "ddl_set_stream": [c_void_p],
    "ddl_send": _MESSAGE,
    "ddl_recv": [*_MESSAGE, POINTER(c_int)],
    "ddl_isend": _MESSAGE + _REQUEST,
    "ddl_irecv": [*_MESSAGE, POINTER(c_int), *_REQUEST],
    "ddl_iallreduce": _REDUCTION + _REQUEST,
    "ddl_ireduce_scatter": _REDUCTION + _REQUEST,
    "ddl_iallgather": _MOVEMENT + _REQUEST,
    "ddl_ialltoall": _MOVEMENT + _REQUEST,
    "ddl_ibroadcast": _BROADCAST + _REQUEST,
    "ddl_ibarrier": [c_void_p, *_REQUEST],
    "ddl_allreduce": _REDUCTION,
    "ddl_reduce_scatter": _REDUCTION,
    "ddl_allgather": _MOVEMENT,
    "ddl_alltoall": _MOVEMENT,
    "ddl_broadcast": _BROADCAST,
    "ddl_barrier": [c_void_p],
    "ddl_test": [POINTER(c_void_p), POINTER(c_int)],
    "ddl_wait": [POINTER(c_void_p)],
}


def candidates() -> Iterator[Path]:
    """Where the library may lie, in the order of preference: `DDL_LIBRARY`, the installed one, the repository's."""
    if chosen := os.environ.get("DDL_LIBRARY"):
        yield Path(chosen)
        return
    here = Path(__file__).resolve().parent
    yield here / NAME
    yield Path(sys.prefix, "lib", NAME)  # a conda package of its own
    import importlib.metadata  # here, because it takes as long as all the rest, and is rarely needed

    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        # An editable install has the library in site-packages and the sources elsewhere.
        yield Path(str(importlib.metadata.distribution(DISTRIBUTION).locate_file(f"ddl/{NAME}")))
    tree = here.parents[2]
    if (tree / "ddl" / "CMakeLists.txt").is_file():
        built = (tree / "out" / "ddl-build").glob(f"*/{NAME}")
        yield from sorted(built, key=lambda path: path.stat().st_mtime, reverse=True)


def find() -> Path:
    """The library's file. Raises LibraryError that lists where it was looked for."""
    looked = list(candidates())
    for path in looked:
        if path.is_file():
            return path
    raise LibraryError(
        f"{NAME} was not found ({', '.join(map(str, looked))}): run `make setup`, install {DISTRIBUTION}, "
        "or name the file in DDL_LIBRARY"
    )


def beside(name: str) -> Path | None:
    """A file in the library's own folder, such as PLUGIN; None if it is not there, or there is no library."""
    for path in candidates():
        if path.is_file():
            found = path.resolve().with_name(name)
            return found if found.is_file() else None
    return None


@functools.cache
def load() -> ctypes.CDLL:
    """The library, loaded once. Raises LibraryError."""
    path = find()
    try:
        # By its own name: it looks for its plugin beside itself, and lib/ holds links to it.
        library = ctypes.CDLL(str(path.resolve()))
        library.ddl_version.argtypes = []
        library.ddl_last_error.argtypes = []
        library.ddl_last_error.restype = c_char_p
        for name, arguments in _FUNCTIONS.items():
            getattr(library, name).argtypes = arguments
    except (OSError, AttributeError) as error:
        raise LibraryError(
            f"{path} could not be loaded: {error}. If it is of another machine or version, reinstall {DISTRIBUTION}"
        ) from error
    number = library.ddl_version()
    found = (number // 10000, number // 100 % 100)
    if found != VERSION:
        raise LibraryError(
            f"{path} has version {found[0]}.{found[1]}, but this package is for {VERSION[0]}.{VERSION[1]}: reinstall it"
        )
    return library


def call(name: str, *arguments: object) -> None:
    """Call a function of the library; raises the DDLError that its result stands for."""
    library = load()
    if code := getattr(library, name)(*arguments):
        raise error_of(code, (library.ddl_last_error() or b"").decode(errors="replace"))


def number(name: str, *arguments: object) -> int:
    """What a function of the library stores as an int in its last argument. Raises DDLError."""
    value = c_int()
    call(name, *arguments, byref(value))
    return value.value
