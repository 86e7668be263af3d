"""Traces in files: `lms.core.trace.Trace`, with `save` and `load`."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from lms.core import trace
from lms.errors import UsageError
from lms.files import write_aside


class Trace(trace.Trace):
    """A recorded step that can be written to a file and read from one."""

    @classmethod
    def of(cls, plain: trace.Trace) -> Trace:
        """The same trace, as one that has files."""
        return cls(**{one.name: getattr(plain, one.name) for one in fields(plain)})

    def save(self, path: str | Path) -> None:
        """Write the trace to `path`; a partial file never stands there."""
        write_aside(Path(path), self.to_json().encode())

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a trace. Raises UsageError if the file is missing or is no trace."""
        try:
            text = Path(path).read_text()
        except OSError as error:
            raise UsageError(f"TRACE={str(path)!r}: {error.strerror}; record one with `lms run --trace FILE`") from None
        except ValueError:
            raise UsageError(f"TRACE={str(path)!r}: not a JSON file; expected what `lms run --trace` wrote") from None
        try:
            return cls.from_json(text)
        except ValueError as error:
            raise UsageError(f"TRACE={str(path)!r}: {error}") from None
