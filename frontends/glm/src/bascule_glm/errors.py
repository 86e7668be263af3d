"""What can go wrong. Every message says what was asked, what was found, and what to do."""

from __future__ import annotations


class GLMError(Exception):
    """The base of all errors of this package."""


class DataError(GLMError, ValueError):
    """Data, a label, or an argument that cannot be used."""


class FileError(GLMError, OSError):
    """A file that is damaged, cut or of another version."""


class ScaleWarning(UserWarning):
    """Columns of very different scale: their penalties differ as much, and first-order solvers are slow."""
