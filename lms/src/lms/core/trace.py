"""What one pass saved, used and freed, with bytes and times: plain data, read and written as JSON.

A *pass* runs from the first live record until none is live. A *record* is one (storage, version) that autograd saved,
whatever number of views of it were saved. An *access* is a save of a record in the forward, or a use in the backward;
accesses are numbered from 0 in the order in which they happened, and every position in a pass is such a number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from itertools import pairwise
from reprlib import repr as shortened
from typing import Literal, Self

from lms import documents
from lms.core.link import Link

FORMAT = "lms-trace-1"
MOST_PASSES = 1e6  # in a cycle


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
    cycle: float = 0.0  # seconds from one optimizer step to the next, all that LMS added left out; 0: not measured
    busy: float = 0.0  # of them, seconds in which the device computed
    passes: float = 1.0  # passes in a cycle, each counted by its saved bytes over this one's
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

    def step_seconds(self, seconds: float) -> float:
        """Seconds from one optimizer step to the next if each pass takes `seconds`.

        What the cycle has outside its passes (waiting for data, the optimizer's step) stays as it is. If the cycle was
        not measured: `seconds`.
        """
        if not self.cycle:
            return seconds
        return max(0.0, self.cycle - self.passes * self.seconds) + self.passes * seconds

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
        """Raise ValueError if accesses and records are not those of one pass, or are more bytes than any device has."""
        touches: list[tuple[str, int] | None] = [None] * len(self.accesses)
        for index, record in enumerate(self.records):
            where = f"records[{index}]"
            for kind, positions in (("save", record.saves), ("use", record.uses)):
                for at in positions:
                    if touches[at] is not None:
                        raise ValueError(f"{where}: access {at} is another record's, or is named twice")
                    touches[at] = (kind, index)
                if any(one >= next_one for one, next_one in pairwise(positions)):
                    raise ValueError(f"{where}.{kind}s: expected ascending accesses")
            if not record.saves:
                raise ValueError(f"{where}.saves: expected one or more accesses, found none")
            if not max(record.saves[0], *record.saves, *record.uses) < record.freed:
                raise ValueError(f"{where}.freed: {record.freed} is not after its last access")
            if record.uses and record.uses[0] < record.saves[0]:
                raise ValueError(f"{where}.uses: it was used before it was saved")
        for at, access in enumerate(self.accesses):
            if touches[at] != (access.kind, access.record):
                raise ValueError(f"accesses[{at}]: a {access.kind} of records[{access.record}], which has none there")
        if (total := sum(record.nbytes for record in self.records)) > documents.MOST_BYTES:
            raise ValueError(f"records: {total} bytes together, more than {documents.MOST_BYTES}")

    def to_json(self) -> str:
        """The trace as one JSON document, with its format named first."""
        return json.dumps({"format": FORMAT, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The trace that `to_json` wrote. Raises ValueError that says what is wrong, and what to do."""
        try:
            document = documents.parse(text)
        except ValueError:
            raise ValueError("not a JSON file; expected what `lms run --trace` wrote") from None
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ValueError(f"expected the format {FORMAT!r}; record it again with this version")
        try:
            return cls._read(document)
        except ValueError as error:
            raise ValueError(f"damaged ({error}); record it again") from None

    @classmethod
    def _read(cls, document: dict[str, object]) -> Self:
        """The trace in a JSON document. Raises ValueError that names the place of what is wrong."""
        documents.only(document, {"format", *(one.name for one in fields(Trace))})
        entries = documents.items(document.get("accesses"), "accesses")
        accesses = tuple(_access(one, f"accesses[{at}]") for at, one in enumerate(entries))
        found = documents.items(document.get("records"), "records")
        trace = cls(
            records=tuple(_record(one, f"records[{at}]", len(accesses)) for at, one in enumerate(found)),
            accesses=accesses,
            device=documents.text(document.get("device", "cpu"), "device"),
            capacity=documents.nbytes(document.get("capacity", 0), "capacity"),
            tail=documents.seconds(document.get("tail", 0.0), "tail"),
            tail_other=documents.nbytes(document.get("tail_other", 0), "tail_other"),
            cycle=documents.seconds(document.get("cycle", 0.0), "cycle"),
            busy=documents.seconds(document.get("busy", 0.0), "busy"),
            passes=documents.number(document.get("passes", 1.0), "passes", 0.0, MOST_PASSES),
            link=documents.mapping(document.get("link", {}), "link"),
            machine=documents.texts(document.get("machine", {}), "machine"),
        )
        if trace.link:
            Link.from_dict(trace.link)
        trace.check()
        return trace


def _record(value: object, where: str, end: int) -> Record:
    """A record of a pass of `end` accesses."""
    record = documents.mapping(value, where)
    documents.only(record, {one.name for one in fields(Record)}, where)

    def positions(name: str) -> tuple[int, ...]:
        found = documents.items(record.get(name), f"{where}.{name}")
        return tuple(documents.whole(one, f"{where}.{name}[{at}]", end - 1) for at, one in enumerate(found))

    let_go = record.get("let_go")
    shape = documents.items(record.get("shape", ()), f"{where}.shape")
    return Record(
        nbytes=documents.nbytes(record.get("nbytes"), f"{where}.nbytes"),
        saves=positions("saves"),
        uses=positions("uses"),
        freed=documents.whole(record.get("freed"), f"{where}.freed", end),
        let_go=None if let_go is None else documents.whole(let_go, f"{where}.let_go", end),
        pinned=documents.flag(record.get("pinned", False), f"{where}.pinned"),
        module=documents.text(record.get("module", ""), f"{where}.module"),
        dtype=documents.text(record.get("dtype", ""), f"{where}.dtype"),
        shape=tuple(documents.nbytes(one, f"{where}.shape[{at}]") for at, one in enumerate(shape)),
    )


def _access(value: object, where: str) -> Access:
    access = documents.mapping(value, where)
    documents.only(access, {one.name for one in fields(Access)}, where)
    kind = access.get("kind")
    if kind not in ("save", "use"):
        raise ValueError(f"{where}.kind: expected 'save' or 'use', found {shortened(kind)}")
    return Access(
        kind="save" if kind == "save" else "use",
        record=documents.nbytes(access.get("record"), f"{where}.record"),
        seconds=documents.seconds(access.get("seconds"), f"{where}.seconds"),
        other=documents.nbytes(access.get("other", 0), f"{where}.other"),
    )
