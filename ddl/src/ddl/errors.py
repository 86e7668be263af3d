"""What can go wrong. Every message says what was asked, what was found, and what to do."""

from __future__ import annotations


class DDLError(RuntimeError):
    """The base of all errors of this package."""


class ArgumentError(DDLError, ValueError):
    """An argument's value is not allowed; nothing was started."""


class StateError(DDLError):
    """Before `ddl.init`, after `ddl.finalize`, or on a communicator that was freed."""


class MismatchError(DDLError):
    """Ranks called different things; the message names both calls."""


class RankTimeoutError(DDLError, TimeoutError):
    """A rank did not arrive within `DDL_TIMEOUT` seconds; the message names it and its last call."""


class PeerLostError(DDLError, ConnectionError):
    """A rank died, or its host or the link to it is gone; the message names it."""


class ShutdownError(DDLError):
    """A rank, maybe this one, left with the collective unfinished; the message names it.

    It called `finalize`, or freed the communicator.
    """


class OutOfMemoryError(DDLError, MemoryError):
    """There is no memory for the library's own buffers."""


class TransportError(DDLError):
    """MPI reported an error."""


class UnsupportedError(DDLError, NotImplementedError):
    """This build of the library, or this machine, cannot do it."""


class InternalError(DDLError):
    """A defect of the library: please report it."""


class LaunchError(DDLError):
    """The processes of this job were not started in a way that lets them find one another."""


class LibraryError(DDLError, ImportError):
    """libddl.so was not found, could not be loaded, or is of another version than this package."""


# ddl_result of ddl.h.
_OF_CODE: dict[int, type[DDLError]] = {
    1: ArgumentError,
    2: StateError,
    3: MismatchError,
    4: RankTimeoutError,
    5: PeerLostError,
    6: ShutdownError,
    7: OutOfMemoryError,
    8: TransportError,
    9: UnsupportedError,
    10: InternalError,
}


def error_of(code: int, message: str) -> DDLError:
    """The exception for a code of the library other than success."""
    return _OF_CODE.get(code, InternalError)(message or f"the library returned {code} without a message")
