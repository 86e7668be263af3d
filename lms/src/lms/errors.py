"""The errors of LMS: a base, and a class for each kind that callers handle differently."""

from __future__ import annotations

import errno

TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)


class LMSError(Exception):
    """Base of every error that LMS raises on purpose. `exit_status` is what the command line returns for it."""

    exit_status = 1


class UsageError(LMSError, ValueError):
    """An argument is wrong: the message names it, what was given, and what is allowed."""

    exit_status = 2


class LimitError(LMSError, MemoryError):
    """The limit cannot be met: the message names it, the floor, and the module that needs it."""

    exit_status = 3


class SpillError(LMSError, OSError):
    """A tier below the device refused bytes (full, unwritable, gone). Raised in the step that it happens in."""

    exit_status = 4


class CorruptionError(SpillError):
    """Bytes came back from a tier changed: a short read, or a checksum that does not match."""

    exit_status = 5


def remedy(error: OSError, otherwise: str) -> str:
    """Advice for `error`: raise the limit of open files if too many are open, else `otherwise`."""
    if error.errno in TOO_MANY_FILES:
        return "raise the limit of open files (ulimit -n)"
    return otherwise


def afresh(error: LMSError) -> LMSError:
    """A copy of the error, to be raised: an error that is kept would keep the frames that it passes through."""
    again = type(error)(*error.args)
    again.__cause__ = error.__cause__
    return again
