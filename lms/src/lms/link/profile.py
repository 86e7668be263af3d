"""A machine's links as one document: measured here, or described from what its makers published."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from lms.errors import UsageError
from lms.files import write_aside
from lms.link.link import Link
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
            return _read(dict(document))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(f"{where}: damaged ({error}); measure again (`lms link measure -o FILE.json`)") from None

    def with_links(self, links: Iterable[MeasuredLink]) -> Profile:
        """The same machine with other links."""
        return replace(self, links=tuple(links))


def _read(document: dict[str, object]) -> Profile:
    document.pop("format")
    links = tuple(_read_link(_map(one, f"links[{at}]"), f"links[{at}]") for at, one in _items(document, "links"))
    names = [one.name for one in links]
    if len(set(names)) < len(names):
        raise ValueError("two links of one name")
    absent = [_map(one, f"absent[{at}]") for at, one in _items(document, "absent")]
    origin = document.get("origin")
    if origin not in get_args(Origin):
        raise ValueError(f"origin: expected {' or '.join(get_args(Origin))}, found {origin!r}")
    _text(document, "name")
    _text({"when": ""} | document, "when")
    for name, value in _map(document.get("machine", {}), "machine").items():
        if not isinstance(value, str):
            raise ValueError(f"machine.{name}: expected a text, found {value!r}")
    for name, value in _map(document.get("capacity", {}), "capacity").items():
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ValueError(f"capacity.{name}: expected bytes, found {value!r}")
    fields = document | {"links": links, "absent": tuple(Absence(str(one["what"]), str(one["why"])) for one in absent)}
    return Profile(**fields)  # type: ignore[arg-type]


def _read_link(document: dict[str, object], where: str) -> MeasuredLink:
    for key in ("name", "what"):
        _text(document, key, where)
    if document.get("kind") not in list(KINDS):
        raise ValueError(f"{where}.kind: expected one of {', '.join(KINDS)}, found {document.get('kind')!r}")
    series = []
    for at, one in _items(document, "series", where):
        place = f"{where}.series[{at}]"
        try:
            series.append(Series.from_dict(_map(one, place)))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{place}: {error}") from None
    ceiling = document.get("ceiling")
    if ceiling is not None:
        ceiling = _read_ceiling(_map(ceiling, f"{where}.ceiling"), f"{where}.ceiling")
    notes = tuple(str(note) for _, note in _items(document, "notes", where))
    fields = document | {"series": tuple(series), "ceiling": ceiling, "notes": notes}
    return MeasuredLink(**fields)  # type: ignore[arg-type]


def _read_ceiling(document: dict[str, object], where: str) -> Ceiling:
    for way in ("out", "back"):
        rate = document.get(way)
        if not isinstance(rate, (int, float)) or not 0 < rate < float("inf"):
            raise ValueError(f"{where}.{way}: expected bytes a second, found {rate!r}")
    _text(document, "source", where)
    return Ceiling(**document)  # type: ignore[arg-type]


def _text(document: Mapping[str, object], key: str, where: str = "") -> None:
    if not isinstance(document.get(key), str):
        raise ValueError(f"{where}{'.' if where else ''}{key}: expected a text, found {document.get(key)!r}")


def _map(value: object, where: str) -> dict[str, object]:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected an object, found {value!r}")
    return value


def _items(document: Mapping[str, object], key: str, where: str = "") -> list[tuple[int, object]]:
    """The list at `key` with its places; only `links` and `series` must be there."""
    value = document.get(key, None if key in ("links", "series") else ())
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{where}{'.' if where else ''}{key}: expected a list, found {value!r}")
    return list(enumerate(value))
