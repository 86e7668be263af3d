"""A machine's links as one document: measured here, or described from what its makers published."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from reprlib import repr as shortened
from typing import Literal, get_args

from lms import documents
from lms.core.link import Link
from lms.errors import UsageError
from lms.files import write_aside
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
ORIGINS: tuple[Origin, ...] = get_args(Origin)

_USED = ("pinned", "O_DIRECT")  # by which LMS itself copies: preferred where a link was measured by several means


@dataclass(frozen=True)
class Ceiling:
    """What a link could carry at most, bytes a second in each direction, and where that figure is from."""

    out: float
    back: float
    source: str

    def of(self, direction: Direction) -> float:
        """Bytes a second of a direction; both directions at once could have both."""
        return {"out": self.out, "back": self.back, "both": self.out + self.back, "copy": self.out}[direction]


@dataclass(frozen=True)
class MeasuredLink:
    """One link with what was measured (or published) of it, and what has to be known to read the figures."""

    name: str  # unique in its profile: "gpu0", "file /scratch", "gpu0-gpu1"
    kind: Kind
    what: str  # in words: "NVIDIA H100 over PCIe 5 x16"
    series: tuple[Series, ...] = ()
    ceiling: Ceiling | None = None
    notes: tuple[str, ...] = ()

    def best(self, direction: Direction) -> Series | None:
        """The series of a direction by the means that LMS uses, or else the fastest; None where there is none."""
        found = [one for one in self.series if one.direction == direction]
        used = [one for one in found if one.via in _USED]
        return max(used or found, key=lambda one: one.rate, default=None)

    def link(self) -> Link | None:
        """The link as the planner knows it; None where a direction is missing."""
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
    capacity: Mapping[str, int] = field(default_factory=dict)
    when: str = ""  # ISO 8601

    def of(self, kind: Kind) -> list[MeasuredLink]:
        """The links of a kind, in order."""
        return [one for one in self.links if one.kind == kind]

    def to_json(self) -> str:
        """The profile as one JSON document, with its format named first."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"

    def save(self, path: Path) -> None:
        """Write it to `path`, whole or not at all. Raises OSError."""
        write_aside(path, self.to_json().encode())

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
            return _read(document)
        except ValueError as error:
            raise UsageError(f"{where}: damaged ({error}); measure again (`lms link measure -o FILE.json`)") from None

    def with_links(self, links: Iterable[MeasuredLink]) -> Profile:
        """The same machine with other links."""
        return replace(self, links=tuple(links))


def _read(document: Mapping[str, object]) -> Profile:
    """The profile in a JSON document. Raises ValueError that names the place of what is wrong."""
    documents.only(document, {"format", *(one.name for one in fields(Profile))})
    found = documents.items(document.get("links"), "links")
    links = tuple(_read_link(documents.mapping(one, f"links[{at}]"), f"links[{at}]") for at, one in enumerate(found))
    names = [one.name for one in links]
    if len(set(names)) < len(names):
        raise ValueError("two links of one name")
    origin = next((one for one in ORIGINS if one == document.get("origin")), None)
    if origin is None:
        raise ValueError(f"origin: expected {' or '.join(ORIGINS)}, found {shortened(document.get('origin'))}")
    absent = enumerate(documents.items(document.get("absent", ()), "absent"))
    capacity = documents.mapping(document.get("capacity", {}), "capacity")
    return Profile(
        name=documents.text(document.get("name"), "name"),
        origin=origin,
        links=links,
        absent=tuple(_absence(documents.texts(one, f"absent[{at}]"), f"absent[{at}]") for at, one in absent),
        machine=documents.texts(document.get("machine", {}), "machine"),
        capacity={name: documents.nbytes(one, f"capacity.{name}", 1) for name, one in capacity.items()},
        when=documents.text(document.get("when", ""), "when"),
    )


def _absence(document: Mapping[str, str], where: str) -> Absence:
    return Absence(*(documents.text(document.get(name), f"{where}.{name}") for name in ("what", "why")))


def _read_link(document: Mapping[str, object], where: str) -> MeasuredLink:
    documents.only(document, {one.name for one in fields(MeasuredLink)}, where)
    kind = next((one for one in KINDS if one == document.get("kind")), None)
    if kind is None:
        raise ValueError(f"{where}.kind: expected one of {', '.join(KINDS)}, found {shortened(document.get('kind'))}")
    found = enumerate(documents.items(document.get("series"), f"{where}.series"))
    places = [(one, f"{where}.series[{at}]") for at, one in found]
    ceiling = document.get("ceiling")
    notes = enumerate(documents.items(document.get("notes", ()), f"{where}.notes"))
    return MeasuredLink(
        name=documents.text(document.get("name"), f"{where}.name"),
        kind=kind,
        what=documents.text(document.get("what"), f"{where}.what"),
        series=tuple(Series.from_dict(documents.mapping(one, place), place) for one, place in places),
        ceiling=None if ceiling is None else _read_ceiling(documents.mapping(ceiling, f"{where}.ceiling"), where),
        notes=tuple(documents.text(note, f"{where}.notes[{at}]") for at, note in notes),
    )


def _read_ceiling(document: Mapping[str, object], where: str) -> Ceiling:
    documents.only(document, {one.name for one in fields(Ceiling)}, f"{where}.ceiling")
    return Ceiling(
        out=documents.rate(document.get("out"), f"{where}.ceiling.out"),
        back=documents.rate(document.get("back"), f"{where}.ceiling.back"),
        source=documents.text(document.get("source"), f"{where}.ceiling.source"),
    )
