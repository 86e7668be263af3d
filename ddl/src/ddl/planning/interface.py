"""ddl_plan.h: the library's simulator and planner. Every number comes from libddl.so; nothing is computed here."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_char, c_char_p, c_double, c_int, c_size_t, c_uint64
from dataclasses import dataclass

from ddl import elements, library
from ddl.errors import ArgumentError, LibraryError

MOST_TIERS = 8
ALGORITHMS = ("automatic", "latency", "bandwidth")  # ddl_algorithm
KINDS = ("send", "receive", "reduce", "copy", "divide", "reduce_scatter", "allgather")  # ddl_step_kind


@dataclass(frozen=True)
class Tier:
    """A tier of switches: how many children each has, seconds of latency, bytes a second of each child's link."""

    size: int
    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Odd:
    """A child unlike the others of its tier, by its number in the network; 0 children or bytes a second: as others."""

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
    """How an allreduce is done; the default is the library's choice. `ranks`: the rank at each position."""

    mode: str | None = None
    chunks: int = 0
    ranks: tuple[int, ...] | None = None
    algorithm: str = "automatic"


@dataclass(frozen=True)
class Term:
    """What is behind a formula's time: latency in seconds, and bytes through the link of one child: see ddl_term."""

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
    """The witness of the bound of any algorithm: bytes that must leave groups of ranks, by what capacity: see ddl_cut.

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
    """The least that an allreduce can take, in seconds, and why: see ddl_bounds.

    `tier_terms` add up to `hierarchical`, and the longest of them is `pipelined`; these are 0 where tiers are uneven.
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
    """What an allreduce would do: see ddl_forecast. One entry a tier in `tier_bytes` and `tier_messages`."""

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
    """A step of one rank: see ddl_step. `peer` is None where there is no message, `tier` where nothing is sent."""

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
    return made.read(len(tree.tiers))


def forecast(tree: Tree, count: int, dtype: str = "float32", plan: Plan | None = None) -> Forecast:
    """The forecast of an allreduce of `count` elements. Raises ArgumentError."""
    made = _Forecast()
    _call("ddl_plan_forecast", _network(tree), _plan(plan), count, elements.TYPES[dtype].number, byref(made))
    return made.read(len(tree.tiers))


def alternatives(tree: Tree, count: int, dtype: str = "float32") -> list[Forecast]:
    """First what the library does, then the other plans that make sense, by time. Raises ArgumentError."""
    found = c_size_t()
    forecasts = (_Forecast * (2 ** (MOST_TIERS - 1) + 2))()  # ways of joining neighbours, and two more
    arguments = (_network(tree), count, elements.TYPES[dtype].number)
    _call("ddl_plan_alternatives", *arguments, forecasts, len(forecasts), byref(found))
    return [one.read(len(tree.tiers)) for one in forecasts[: found.value]]


def schedule(tree: Tree, count: int, rank: int, dtype: str = "float32", plan: Plan | None = None) -> list[Step]:
    """The steps of one rank, in order. Raises ArgumentError."""
    found = c_size_t()
    arguments = (_network(tree), _plan(plan), count, elements.TYPES[dtype].number, _whole(rank, "rank"))
    _call("ddl_plan_schedule", *arguments, None, 0, byref(found))
    steps = (_Step * found.value)()
    _call("ddl_plan_schedule", *arguments, steps, len(steps), byref(found))
    return [one.read() for one in steps]


class _Tier(Structure):
    _fields_ = (("size", c_int), ("latency", c_double), ("bandwidth", c_double))


class _Odd(Structure):
    _fields_ = (("tier", c_int), ("child", c_int), ("size", c_int), ("bandwidth", c_double))


class _Network(Structure):
    _fields_ = (
        ("tiers", POINTER(_Tier)),
        ("tier_count", c_int),
        ("reduce_bandwidth", c_double),
        ("odd", POINTER(_Odd)),
        ("odd_count", c_int),
    )


class _Plan(Structure):
    _fields_ = (("mode", c_char_p), ("chunks", c_int), ("ranks", POINTER(c_int)), ("algorithm", c_int))


class _Term(Structure):
    _fields_ = (
        ("latency", c_double),
        ("bytes", c_double),
        ("capacity", c_double),
        ("tier", c_int),
        ("child", c_int),
    )

    def read(self) -> Term | None:
        return Term(self.latency, self.bytes, self.capacity, self.tier, self.child) if self.tier >= 0 else None


class _Cut(Structure):
    _fields_ = (
        ("tier", c_int),
        ("first", c_int),
        ("count", c_int),
        ("groups", c_int),
        ("bytes", c_double),
        ("capacity", c_double),
    )

    def read(self) -> Cut | None:
        cut = Cut(self.tier, self.first, self.count, self.groups, self.bytes, self.capacity)
        return cut if self.tier >= 0 else None


class _Bounds(Structure):
    _fields_ = (
        ("ring", c_double),
        ("hierarchical", c_double),
        ("pipelined", c_double),
        ("cut", c_double),
        ("ring_term", _Term),
        ("tier_terms", _Term * MOST_TIERS),
        ("cut_witness", _Cut),
    )

    def read(self, tiers: int) -> Bounds:
        terms = tuple(term.read() for term in self.tier_terms[:tiers])
        times = (self.ring, self.hierarchical, self.pipelined, self.cut)
        return Bounds(*times, self.ring_term.read(), terms, self.cut_witness.read())


class _Forecast(Structure):
    _fields_ = (
        ("seconds", c_double),
        ("tier_bytes", c_double * MOST_TIERS),
        ("tier_messages", c_double * MOST_TIERS),
        ("chunks", c_int),
        ("rounds", c_int),
        ("symmetric", c_int),
        ("plan", c_char * 64),
        ("algorithm", c_char * 64),
        ("reason", c_char * 192),
    )

    def read(self, tiers: int) -> Forecast:
        return Forecast(
            self.seconds,
            tuple(self.tier_bytes[:tiers]),
            tuple(self.tier_messages[:tiers]),
            self.chunks,
            self.rounds,
            bool(self.symmetric),
            self.plan.decode(),
            self.algorithm.decode(),
            self.reason.decode(errors="replace"),
        )


class _Step(Structure):
    _fields_ = (
        ("chunk", c_int),
        ("round", c_int),
        ("kind", c_int),
        ("peer", c_int),
        ("tier", c_int),
        ("offset", c_uint64),
        ("bytes", c_uint64),
    )

    def read(self) -> Step:
        return Step(
            self.chunk,
            self.round,
            KINDS[self.kind],
            self.peer if self.peer >= 0 else None,
            self.tier if self.tier >= 0 else None,
            self.offset,
            self.bytes,
        )


_TASK = [POINTER(_Network), POINTER(_Plan), c_size_t, c_int]
_FUNCTIONS = {
    "ddl_plan_bounds": [POINTER(_Network), c_uint64, POINTER(_Bounds)],
    "ddl_plan_forecast": [*_TASK, POINTER(_Forecast)],
    "ddl_plan_alternatives": [
        POINTER(_Network), c_size_t, c_int, POINTER(_Forecast), c_size_t, POINTER(c_size_t),
    ],
    "ddl_plan_schedule": [*_TASK, c_int, POINTER(_Step), c_size_t, POINTER(c_size_t)],
}  # fmt: skip


@functools.cache
def _declare() -> None:
    loaded = library.load()
    for name, arguments in _FUNCTIONS.items():
        try:
            getattr(loaded, name).argtypes = arguments
        except AttributeError:
            raise LibraryError(
                f"{library.find()} has no {name}: it is older than this package; run `make setup`, or reinstall "
                f"{library.DISTRIBUTION}"
            ) from None


def _call(name: str, *arguments: object) -> None:
    _declare()
    library.call(name, *arguments)


def _whole(value: int, what: str) -> int:
    """What fits in a C int; ctypes would drop the upper bits of others in silence. Raises ArgumentError."""
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


def _plan(plan: Plan | None) -> _Plan:
    asked = plan or Plan()
    ranks: Sequence[int] = asked.ranks or ()
    return _Plan(
        asked.mode.encode() if asked.mode else None,
        _whole(asked.chunks, "chunks"),
        (c_int * len(ranks))(*(_whole(rank, "ranks") for rank in ranks)) if ranks else None,
        ALGORITHMS.index(asked.algorithm),
    )
