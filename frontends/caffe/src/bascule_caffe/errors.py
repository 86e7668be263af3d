"""What can go wrong. Every message says what was asked, what was found, and what to do."""

from __future__ import annotations


class CaffeError(Exception):
    """The base of all errors of this package."""


class NetError(CaffeError, ValueError):
    """A net, a solver or a field of theirs that cannot be used; the message begins with the file and the line."""


class NoLayerError(NetError):
    """A model that has no layer of a net."""


class FileError(CaffeError, OSError):
    """A file that is missing, damaged, cut or of another kind."""
