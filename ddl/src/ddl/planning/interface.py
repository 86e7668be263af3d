"""ddl_plan.h: the library's simulator and planner. libddl.so computes every number."""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_char, c_char_p, c_double, c_int, c_size_t, c_uint64
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from ddl import elements, library
from ddl.errors import ArgumentError, LibraryError

T = TypeVar("T")

MOST_TIERS = 8
KINDS = ("send", "receive", "reduce", "copy", "divide", "reduce_scatter", "allgather")  # ddl_step_kind


@dataclass(frozen=True)
class Tier:
    """A tier of switches: how many children each has, seconds of latency, bytes a second of each child's link."""

    size: int
    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Odd:
    """A child that differs from the others of its tier, by its number in the network; 0: as the others."""

    tier: int
    child: int
    size: int = 0
    bandwidth: float = 0.0


@dataclass(frozen=True)
class Tree:
    """Tiers, innermost first: ranks of a host, hosts of a rack, ...; `reduce` is bytes a second (0: takes no time)."""

    tiers: tuple[Tier, ...]
    reduce: float = 0.0
    odd: tuple[Odd, ...] = ()


@dataclass(frozen=True)
class Plan:
    """How to run an allreduce; the default leaves it to the library."""

    mode: str | None = None
    chunks: int = 0


@dataclass(frozen=True)
class Term:
    """A term of a bound: latency in seconds, and bytes through the link of one child: see ddl_term."""

    latency: float
    nbytes: float
    capacity: float
    tier: int
    child: int

    @property
    def seconds(self) -> float:
        """The term's time."""
        return self.latency + self.nbytes / self.capacity


@dataclass(frozen=True)
class Cut:
    """The witness of the bound of any algorithm: bytes that must leave groups of ranks, and the capacity: see ddl_cut.

    The groups are `count` children of `tier`, from `first` on, and the ranks elsewhere, if there are any.
    """

    tier: int
    first: int
    count: int
    groups: int
    nbytes: float
    capacity: float


@dataclass(frozen=True)
class Bounds:
    """Lower bounds on an allreduce, in seconds, with their reasons: see ddl_bounds.

    `tier_terms` add up to `hierarchical`, and the longest of them is `pipelined`; both are 0 if tiers are uneven.
    """

    ring: float
    hierarchical: float
    pipelined: float
    cut: float
    ring_term: Term | None
    tier_terms: tuple[Term | None, ...]
    cut_witness: Cut | None


@dataclass(frozen=True)
class Forecast:
    """A forecast of an allreduce: see ddl_forecast. `tier_bytes` and `tier_messages` have one entry a tier."""

    seconds: float
    tier_bytes: tuple[float, ...]
    tier_messages: tuple[float, ...]
    chunks: int
    rounds: int
    symmetric: bool
    plan: str
    algorithm: str
    reason: str


@dataclass(frozen=True)
class Step:
    """A step of one rank: see ddl_step. `peer` is None if there is no message, `tier` if nothing is sent."""

    chunk: int
    round: int
    kind: str
    peer: int | None
    tier: int | None
    offset: int
    nbytes: int


def bounds(tree: Tree, nbytes: int) -> Bounds:
    """The bounds of an allreduce of `nbytes` bytes. Raises ArgumentError."""
    made = _Bounds()
    _call("ddl_plan_bounds", _network(tree), nbytes, byref(made))
    terms = tuple(_read_if(Term, one) for one in made.tier_terms[: len(tree.tiers)])
    ring, cut = _read_if(Term, made.ring_term), _read_if(Cut, made.cut_witness)
    return _read(Bounds, made, ring_term=ring, tier_terms=terms, cut_witness=cut)


def forecast(tree: Tree, count: int, dtype: str = "float32", plan: Plan | None = None) -> Forecast:
    """The forecast of an allreduce of `count` elements. Raises ArgumentError."""
    made = _Forecast()
    _call("ddl_plan_forecast", _network(tree), _plan(plan), count, elements.TYPES[dtype].number, byref(made))
    return _read_forecast(made, len(tree.tiers))


def alternatives(tree: Tree, count: int, dtype: str = "float32") -> list[Forecast]:
    """First the library's choice, then the other sensible plans, by time. Raises ArgumentError."""
    found = c_size_t()
    forecasts = (_Forecast * (2 ** (MOST_TIERS - 1) + 2))()  # the ways of joining neighbouring tiers, and two more
    arguments = (_network(tree), count, elements.TYPES[dtype].number)
    _call("ddl_plan_alternatives", *arguments, forecasts, len(forecasts), byref(found))
    return [_read_forecast(one, len(tree.tiers)) for one in forecasts[: found.value]]


def schedule(tree: Tree, count: int, rank: int, dtype: str = "float32", plan: Plan | None = None) -> list[Step]:
    """The steps of one rank, in order. Raises ArgumentError."""
    found = c_size_t()
    arguments = (_network(tree), _plan(plan), count, elements.TYPES[dtype].number, _whole(rank, "rank"))
    _call("ddl_plan_schedule", *arguments, None, 0, byref(found))
    steps = (_Step * found.value)()
    _call("ddl_plan_schedule", *arguments, steps, len(steps), byref(found))
    return list(map(_read_step, steps))


def _structure(like: type, *types: Any) -> Any:
    """The C structure of a dataclass: its fields, in order, with these types."""
    names = [field.name for field in fields(like)]
    return type(f"_{like.__name__}", (Structure,), {"_fields_": list(zip(names, types, strict=True))})


_Tier = _structure(Tier, c_int, c_double, c_double)
_Odd = _structure(Odd, c_int, c_int, c_int, c_double)
_Plan = _structure(Plan, c_char_p, c_int)
_Term = _structure(Term, c_double, c_double, c_double, c_int, c_int)
_Cut = _structure(Cut, c_int, c_int, c_int, c_int, c_double, c_double)
_Bounds = _structure(Bounds, c_double, c_double, c_double, c_double, _Term, _Term * MOST_TIERS, _Cut)
_PER_TIER = c_double * MOST_TIERS
_Forecast = _structure(
    Forecast, c_double, _PER_TIER, _PER_TIER, c_int, c_int, c_int, c_char * 64, c_char * 64, c_char * 192
)
_Step = _structure(Step, c_int, c_int, c_int, c_int, c_int, c_uint64, c_uint64)


class _Network(Structure):
    _fields_ = (
        ("tiers", POINTER(_Tier)),
        ("tier_count", c_int),
        ("reduce_bandwidth", c_double),
        ("odd", POINTER(_Odd)),
        ("odd_count", c_int),
    )


def _read(like: type[T], made: Any, **others: object) -> T:
    """The dataclass of a C structure, with `others` in place of the fields that differ."""
    return like(**{field.name: getattr(made, field.name) for field in fields(like)} | others)  # type: ignore[arg-type]


def _read_if(like: type[T], made: Any) -> T | None:
    return _read(like, made) if made.tier >= 0 else None


def _read_forecast(made: Any, tiers: int) -> Forecast:
    texts = {name: getattr(made, name).decode(errors="replace") for name in ("plan", "algorithm", "reason")}
    each = {name: tuple(getattr(made, name)[:tiers]) for name in ("tier_bytes", "tier_messages")}
    return _read(Forecast, made, symmetric=bool(made.symmetric), **texts, **each)


def _read_step(made: Any) -> Step:
    peer, tier = (None if number < 0 else number for number in (made.peer, made.tier))
    return _read(Step, made, kind=KINDS[made.kind], peer=peer, tier=tier)


_TASK = [POINTER(_Network), POINTER(_Plan), c_size_t, c_int]
_FUNCTIONS = {
    "ddl_plan_bounds": [POINTER(_Network), c_uint64, POINTER(_Bounds)],
    "ddl_plan_forecast": [*_TASK, POINTER(_Forecast)],
    "ddl_plan_alternatives": [
        POINTER(_Network), c_size_t, c_int, POINTER(_Forecast), c_size_t, POINTER(c_size_t),
    ],
    "ddl_plan_schedule": [*_TASK, c_int, POINTER(_Step), c_size_t, POINTER(c_size_t)],
}  # fmt: skip


def _call(name: str, *arguments: object) -> None:
    try:
        getattr(library.load(), name).argtypes = _FUNCTIONS[name]
    except AttributeError:
        raise LibraryError(
            f"{library.find()} has no {name}: it is older than this package; run `make setup`, or reinstall "
            f"{library.DISTRIBUTION}"
        ) from None
    library.call(name, *arguments)


def _whole(value: int, what: str) -> int:
    """`value`, if it fits in a C int; ctypes would silently drop the upper bits. Raises ArgumentError."""
    if not -(2**31) <= value < 2**31:
        raise ArgumentError(f"{what}: {value:,}; expected less than {2**31:,}")
    return value


def _network(tree: Tree) -> _Network:
    made = [
        _Tier(_whole(tier.size, f"size of tier {at} of the network"), tier.latency, tier.bandwidth)
        for at, tier in enumerate(tree.tiers)
    ]
    odd = [_Odd(*(_whole(n, "odd") for n in (one.tier, one.child, one.size)), one.bandwidth) for one in tree.odd]
    return _Network((_Tier * len(made))(*made), len(made), tree.reduce, (_Odd * len(odd))(*odd), len(odd))


def _plan(plan: Plan | None) -> object:
    asked = plan or Plan()
    return _Plan(asked.mode.encode() if asked.mode else None, _whole(asked.chunks, "chunks"))
