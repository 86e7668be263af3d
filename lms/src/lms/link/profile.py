"""A machine's links as one document: measured, or described from its makers' publications."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

from lms import documents
from lms.core.link import Link
from lms.documents import Rate, Some
from lms.errors import UsageError
from lms.link.series import Direction, Series

FORMAT = "lms-link-1"

Kind = Literal["gpu", "file", "memory", "numa", "peer", "network"]
KINDS: Mapping[Kind, str] = {
    "gpu": "GPU to host memory",
    "file": "host memory to a file",
    "memory": "copies in host memory",
    "numa": "memory of another NUMA node",
    "peer": "GPU to GPU",
    "network": "host to host",
}
Origin = Literal["measured", "described"]

_USED = ("pinned", "O_DIRECT")  # by which LMS itself copies: preferred if a link was measured by several means


def readable(name: str) -> str:
    """`name` with a question mark for each letter that cannot be printed: no profile may have it."""
    return "".join(letter if letter.isprintable() else "?" for letter in name)


@dataclass(frozen=True)
class Ceiling:
    """The most that a link could carry, in bytes a second for each direction, and the source of that figure."""

    out: Rate
    back: Rate
    source: str

    def of(self, direction: Direction) -> float:
        """Bytes a second of a direction; both directions at once could have both."""
        return {"out": self.out, "back": self.back, "both": self.out + self.back, "copy": self.out}[direction]


@dataclass(frozen=True)
class MeasuredLink:
    """One link with its measured (or published) series, and notes that a reader of the figures needs."""

    name: str  # unique in its profile: "gpu0", "file /scratch", "gpu0-gpu1"
    kind: Kind
    what: str  # in words: "NVIDIA H100 over PCIe 5 x16"
    series: tuple[Series, ...] = ()
    ceiling: Ceiling | None = None
    notes: tuple[str, ...] = ()

    def best(self, direction: Direction) -> Series | None:
        """The series of a direction by the means that LMS uses, or else the fastest; None if there is none."""
        found = [one for one in self.series if one.direction == direction]
        used = [one for one in found if one.via in _USED]
        return max(used or found, key=lambda one: one.rate, default=None)

    def link(self) -> Link | None:
        """The link as the planner knows it; None if a direction is missing."""
        out, back = self.best("out"), self.best("back")
        if out is None or back is None:
            return None
        return Link(self.name, out.rate, back.rate, max(out.latency, back.latency), self.what)


@dataclass(frozen=True)
class Absence:
    """Something that could have been measured or shown, and why it was not."""

    what: str
    why: str


@dataclass(frozen=True)
class Profile:
    """A machine's links. `capacity` is in bytes: `device` the memory that training must fit, `host`, `file`."""

    name: str
    origin: Origin
    links: tuple[MeasuredLink, ...] = ()
    absent: tuple[Absence, ...] = ()
    machine: Mapping[str, str] = field(default_factory=dict)  # processor, GPUs, driver, versions
    capacity: Mapping[str, Some] = field(default_factory=dict)
    when: str = ""  # ISO 8601

    def of(self, kind: Kind) -> list[MeasuredLink]:
        """The links of a kind, in order."""
        return [one for one in self.links if one.kind == kind]

    def to_json(self) -> str:
        """The profile as one JSON document, with its format named first."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    @classmethod
    def from_dict(cls, document: Mapping[str, object], where: str) -> Profile:
        """The profile in `document`, which was read from `where`. Raises UsageError for anything else."""
        found = document.get("format")
        if found != FORMAT:
            raise UsageError(
                f"{where}: expected the format {FORMAT!r}, found {found!r}; "
                "measure again with this version (`lms link measure -o FILE.json`)"
            )
        try:
            profile = documents.read(cls, {name: one for name, one in document.items() if name != "format"})
            if len({one.name for one in profile.links}) < len(profile.links):
                raise ValueError("two links of one name")
        except ValueError as error:
            raise UsageError(f"{where}: damaged ({error}); measure again (`lms link measure -o FILE.json`)") from None
        return profile
