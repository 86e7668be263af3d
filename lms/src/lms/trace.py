"""What one pass saved, used and freed, with bytes and times: plain data, read and written as JSON.

A *pass* runs from the first live record until none is live. A *record* is one (storage, version) that autograd saved,
whatever number of views of it were saved. An *access* is a save of a record in the forward, or a use in the backward;
accesses are numbered from 0 in the order in which they happened, and every position in a pass is such a number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from lms.errors import UsageError
from lms.files import write_aside

FORMAT = "lms-trace-1"


@dataclass(frozen=True)
class Record:
    """One saved storage at one version. Positions are access numbers."""

    nbytes: int
    saves: tuple[int, ...]  # where the forward saved it: at least one, ascending
    uses: tuple[int, ...]  # where the backward used it, ascending; empty for a branch that was dropped
    freed: int  # the first access after its last handle died; len(accesses) when that was the pass's end
    let_go: int | None = None  # the first access after every other owner let go of it; None: unknown
    pinned: bool = False  # another owner kept it alive past the pass (a batch, a buffer): swapping frees nothing
    module: str = ""  # the module that was running when it was first saved
    dtype: str = ""
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class Access:
    """One touch of a record, and the computation that led to it."""

    kind: Literal["save", "use"]
    record: int  # index into Trace.records
    seconds: float  # computation since the access before, LMS's own work and waiting left out
    other: int = 0  # most device bytes that LMS did not hold since the access before; 0: not measured


@dataclass(frozen=True)
class Trace:
    """One recorded pass. `device` is "cpu" or the GPU's name; `tail` the computation after the last access."""

    records: tuple[Record, ...]
    accesses: tuple[Access, ...]
    device: str = "cpu"
    capacity: int = 0  # bytes that the device has
    tail: float = 0.0  # seconds from the last access to the pass's end
    tail_other: int = 0  # as Access.other, for the tail
    link: Mapping[str, object] = field(default_factory=dict)  # the link that was measured with it (lms.link.Link)
    machine: Mapping[str, str] = field(default_factory=dict)  # host, versions

    @cached_property
    def saved(self) -> int:
        """Bytes that may move: all records but the pinned, each storage counted once for each version."""
        return sum(record.nbytes for record in self.records if not record.pinned)

    @cached_property
    def largest(self) -> int:
        """Bytes of the largest record that may move: the tolerance of every promise about memory."""
        return max((record.nbytes for record in self.records if not record.pinned), default=0)

    @cached_property
    def seconds(self) -> float:
        """Computation of the whole pass: what it takes when nothing has to be waited for."""
        return sum(access.seconds for access in self.accesses) + self.tail

    @cached_property
    def live(self) -> tuple[int, ...]:
        """Bytes of live records at each access when none is moved; pinned ones, which are never moved, left out."""
        change = [0] * (len(self.accesses) + 1)
        for record in self.records:
            if record.pinned:
                continue
            change[record.saves[0]] += record.nbytes
            change[record.freed] -= record.nbytes
        total, live = 0, []
        for step in change[:-1]:
            total += step
            live.append(total)
        return tuple(live)

    def check(self) -> None:
        """Raise ValueError when an access or a position is none of this pass."""
        end = len(self.accesses)
        if any(not 0 <= access.record < len(self.records) for access in self.accesses):
            raise ValueError("an access of a record that is not there")
        for index, record in enumerate(self.records):
            if not record.saves or not all(0 <= at < end for at in (*record.saves, *record.uses)):
                raise ValueError(f"record {index} was saved or used outside the pass")
            if not record.saves[0] < record.freed <= end:
                raise ValueError(f"record {index} was freed outside the pass")

    def to_json(self) -> str:
        """The trace as one JSON document, with its format named first."""
        return json.dumps({"format": FORMAT, **asdict(self)})

    def save(self, path: str | Path) -> None:
        """Write the trace to `path`; a partial file never stands there."""
        write_aside(Path(path), self.to_json().encode())

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        """Read a trace. Raises UsageError when the file is missing or is no trace of this format."""
        try:
            document = json.loads(Path(path).read_text())
        except OSError as error:
            raise UsageError(f"TRACE={str(path)!r}: {error.strerror}; record one with `lms run --trace FILE`") from None
        except ValueError:
            raise UsageError(f"TRACE={str(path)!r}: not a JSON file; expected what `lms run --trace` wrote") from None
        if not isinstance(document, dict) or document.pop("format", None) != FORMAT:
            raise UsageError(f"TRACE={str(path)!r}: expected the format {FORMAT!r}; record it again with this version")
        try:
            records = tuple(
                Record(**(record | {name: tuple(record[name]) for name in ("saves", "uses", "shape")}))
                for record in document.pop("records")
            )
            accesses = tuple(Access(**access) for access in document.pop("accesses"))
            trace = cls(records=records, accesses=accesses, **document)
            trace.check()
            return trace
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"TRACE={str(path)!r}: damaged ({error}); record it again") from None
