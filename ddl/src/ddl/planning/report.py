"""The output of `ddlrun plan`: the network, the plans with their times, the chosen plan's tiers, a rank's steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ddl import elements
from ddl.launch.counts import format_runs
from ddl.planning import forestcoll, interface
from ddl.planning.forestcoll import Optimum
from ddl.planning.interface import Bounds, Cut, Forecast, Plan, Step, Term
from ddl.planning.network import Network
from ddl.planning.units import format_bytes, format_size, format_time

MOST_STEPS = 400  # that are shown as text


@dataclass(frozen=True)
class Study:
    """An allreduce on a network: the chosen plan, the others, fastest first, and the bounds.

    `nbytes` counts whole elements.
    """

    network: Network
    nbytes: int
    dtype: str
    chosen: Forecast
    others: tuple[Forecast, ...]
    bounds: Bounds
    optimum: Optimum | str  # ForestColl's, or why there is none

    def share(self, forecast: Forecast) -> float:
        """The cut bound over a forecast's time: 1 is perfect."""
        return self.bounds.cut / forecast.seconds if forecast.seconds else 1.0

    def bandwidths(self, forecast: Forecast) -> tuple[float | None, float | None]:
        """A forecast's algorithm bandwidth and bus bandwidth in bytes a second; None if it takes no time."""
        if not forecast.seconds:
            return None, None
        rate = self.nbytes / forecast.seconds
        return rate, rate * 2 * (self.network.ranks - 1) / self.network.ranks


def study(network: Network, nbytes: int, dtype: str, plan: Plan | None) -> Study:
    """Simulate an allreduce of as many elements as fit in `nbytes` bytes, at least one.

    If a `plan` is given, it is the chosen one, and the library's choice is among the others. Raises ddl.ArgumentError
    for a plan that does not fit.
    """
    element = elements.TYPES[dtype].nbytes
    count = max(1, nbytes // element)
    found = interface.alternatives(network.tree, count, dtype)
    chosen, others = found[0], found[1:]
    if plan is not None:
        chosen = interface.forecast(network.tree, count, dtype, plan)
        others = sorted(
            (one for one in found if (one.plan, one.algorithm, one.chunks) != _key(chosen)),
            key=lambda one: one.seconds,
        )
    bounds = interface.bounds(network.tree, count * element)
    return Study(network, count * element, dtype, chosen, tuple(others), bounds, _optimum(network))


def _optimum(network: Network) -> Optimum | str:
    if not 2 <= network.ranks <= forestcoll.MOST_RANKS:
        return f"for 2 to {forestcoll.MOST_RANKS} ranks"
    try:
        return forestcoll.optimum(forestcoll.graph_of(network))
    except forestcoll.SolverMissing as missing:
        return str(missing)


def to_text(made: Study) -> str:
    """The study as text."""
    network = made.network
    title = f"{network.name}: " if network.name else ""
    ranks = "1 rank" if network.ranks == 1 else f"{network.ranks:,} ranks"
    parts = [f"{title}{ranks}", network.picture(), ""]
    if network.source:
        parts[1] += f"\n({network.source})"
    parts.append(f"allreduce of {format_size(made.nbytes)} of {made.dtype}, simulated")
    parts.append(f"plan {_name(made.chosen)}: {made.chosen.reason}")
    if _is_timed_as_rings(made.chosen):
        parts.append("(timed as rings in each dimension: the algorithms of MPI and NCCL are not known)")
    parts += ["", _plans(made), "", _bounds(made), "", _tiers(made)]
    return "\n".join(parts) + "\n"


def to_dict(made: Study) -> dict[str, object]:
    """The study as plain data: seconds, bytes, bytes a second."""

    def row(forecast: Forecast) -> dict[str, object]:
        algorithm, bus = made.bandwidths(forecast)
        return {
            **asdict(forecast),
            "timed_as_rings": _is_timed_as_rings(forecast),
            "share_of_bound": made.share(forecast),
            "algorithm_bandwidth": algorithm,
            "bus_bandwidth": bus,
        }

    return {
        "simulation": True,
        "network": made.network.to_dict(),
        "ranks": made.network.ranks,
        "bytes": made.nbytes,
        "type": made.dtype,
        "bounds": {
            **{name: getattr(made.bounds, name) for name in ("ring", "hierarchical", "pipelined", "cut")},
            "forestcoll": made.optimum.seconds(made.nbytes) if isinstance(made.optimum, Optimum) else None,
        },
        "witnesses": _witnesses(made),
        "chosen": row(made.chosen),
        "alternatives": list(map(row, made.others)),
    }


def steps_to_text(steps: Sequence[Step], rank: int, network: Network) -> str:
    """A rank's schedule: a line for each step, a blank line between chunks, at most MOST_STEPS lines."""
    lines = [f"schedule of rank {rank}: {len(steps):,} steps", "chunk round  step"]
    chunk = -1
    width = max([7, *(len(step.kind) for step in steps)])
    for at, step in enumerate(steps):
        if at == MOST_STEPS:
            lines.append(f"... and {len(steps) - MOST_STEPS:,} more (--json has them all)")
            break
        if step.chunk != chunk and chunk >= 0:
            lines.append("")
        chunk = step.chunk
        where = ""
        if step.peer is not None and step.tier is not None:
            way = "to" if step.kind == "send" else "from"
            where = f" {way} rank {step.peer}, by the {network.levels[step.tier].name} tier"
        elif step.tier is not None:
            where = f", among ranks of the {network.levels[step.tier].name} tier"
        last = step.offset + step.nbytes - 1
        lines.append(f"{step.chunk:5} {step.round:5}  {step.kind:{width}} bytes {step.offset}..{last}{where}")
    return "\n".join(lines) + "\n"


def _key(forecast: Forecast) -> tuple[str, str, int]:
    return forecast.plan, forecast.algorithm, forecast.chunks


def _name(forecast: Forecast) -> str:
    """`r:2x2x2 in 32 chunks`; recursive doubling has no dimensions, and MPI or NCCL may run no ring."""
    if forecast.algorithm.startswith("recursive"):
        return forecast.algorithm
    flat = forecast.algorithm == "flat ring" and not _is_timed_as_rings(forecast)
    ring = " (flat ring)" if flat else ""
    return f"{forecast.plan}{ring} in {forecast.chunks} {'chunk' if forecast.chunks == 1 else 'chunks'}"


def _is_timed_as_rings(forecast: Forecast) -> bool:
    """Whether MPI or NCCL runs one of its dimensions; the simulator does not know their algorithms."""
    return not set(forecast.plan.partition(":")[0]) <= {"r"}


def _plans(made: Study) -> str:
    rows = [("", "plan", "time", "of the bound", "alg. bandwidth", "bus bandwidth", "rounds")]
    for at, one in enumerate((made.chosen, *made.others)):
        algorithm, bus = made.bandwidths(one)
        rows.append(
            (
                "" if at else ">",
                _name(one),
                format_time(one.seconds),
                f"{made.share(one):.1%}",
                format_bytes(algorithm) if algorithm else "-",
                format_bytes(bus) if bus else "-",
                str(one.rounds),
            )
        )
    return _table(rows, left=2)


def _bounds(made: Study) -> str:
    bounds, network = made.bounds, made.network
    terms = [term for term in bounds.tier_terms if term is not None]
    sizes = "tiers are uneven: there are no such dimensions"
    rows: list[tuple[str, float | None, str]] = [
        ("bound of any algorithm, by cuts (100%)", bounds.cut, _cut_to_text(bounds.cut_witness, network)),
        ("one well-ordered ring, by formula", bounds.ring, _terms_to_text([bounds.ring_term], network)),
        (
            "a dimension a tier, one after the other",
            bounds.hierarchical,
            _terms_to_text(terms, network) if bounds.hierarchical else sizes,
        ),
        (
            "the same with perfect overlap",
            bounds.pipelined,
            _terms_to_text([max(terms, key=lambda term: term.seconds)], network) if terms else sizes,
        ),
    ]
    if isinstance(made.optimum, Optimum):
        rows.append((_FORESTCOLL, made.optimum.seconds(made.nbytes), _optimum_to_text(made.optimum, made.nbytes)))
    elif "scipy" in made.optimum:
        rows.append((_FORESTCOLL, None, made.optimum))
    if network.ranks == 1:
        rows = [(name, seconds, "") for name, seconds, _ in rows]
    lines = []
    for name, seconds, why in rows:
        time = "-" if seconds is None or why == sizes else format_time(seconds)
        lines.append(f"{name:42}{time:9} {why}".rstrip())
    return "\n".join(lines)


_FORESTCOLL = "reduce-scatter + allgather, ForestColl"


def _cut_to_text(cut: Cut | None, network: Network) -> str:
    """`128 MiB must leave rack 0-1, through 25 MB/s in all`."""
    if cut is None:
        return ""
    name = network.levels[cut.tier].name
    children = f"{name} {format_runs(range(cut.first, cut.first + cut.count))}"
    rest = " and the others" if cut.groups > cut.count else ""
    return f"{format_size(cut.nbytes)} must leave {children}{rest}, through {format_bytes(cut.capacity)} in all"


def _terms_to_text(terms: Sequence[Term | None], network: Network) -> str:
    """`112 MiB through the link of rack 0 (12.5 MB/s), 420 us of latency` for each term, joined."""
    parts = []
    for term in terms:
        if term is not None:
            link = f"the link of {network.levels[term.tier].name} {term.child} ({format_bytes(term.capacity)})"
            latency = f", {format_time(term.latency)} of latency" if term.latency else ""
            parts.append(f"{format_size(term.nbytes)} through {link}{latency}")
    return "; ".join(parts)


def _optimum_to_text(optimum: Optimum, nbytes: int) -> str:
    """`32 MiB must leave ranks 4-7, and 32 MiB enter, through 12.5 MB/s`."""
    ranks = f"rank{'s' if len(optimum.inside) > 1 else ''} {format_runs(optimum.inside)}"
    shards = format_size(len(optimum.inside) * nbytes / optimum.ranks)
    return f"{shards} must leave {ranks}, and as much enter, through {format_bytes(optimum.capacity)}"


def _witnesses(made: Study) -> dict[str, object]:
    """The witness of each bound as plain data: bytes, bytes a second, ranks as [first, last]."""
    bounds, network, optimum = made.bounds, made.network, made.optimum

    def term(one: Term | None) -> dict[str, object] | None:
        if one is None:
            return None
        return {"level": network.levels[one.tier].name, **asdict(one), "seconds": one.seconds}

    terms = [one for one in bounds.tier_terms if one is not None]
    cut: dict[str, object] | None = None
    if bounds.cut_witness is not None:
        found = bounds.cut_witness
        groups = network.ranks_below(found.tier)[found.first : found.first + found.count]
        cut = {
            "level": network.levels[found.tier].name,
            **asdict(found),
            "ranks": [[group.start, group.stop - 1] for group in groups],
            "seconds": bounds.cut,
        }
    return {
        "cut": cut,
        "ring": term(bounds.ring_term),
        "hierarchical": list(map(term, terms)),
        "pipelined": term(max(terms, key=lambda one: one.seconds)) if terms else None,
        "forestcoll": asdict(optimum) if isinstance(optimum, Optimum) else {"none": optimum},
    }


def _tiers(made: Study) -> str:
    mean = ", on average" if made.network.odd else ""
    rows = [("tier", "messages a rank", "bytes a rank sends", f"link is busy{mean}")]
    for at, level in enumerate(made.network.levels):
        # Everything that leaves a child of this tier; only messages inside a host use tier 0.
        crossing = made.chosen.tier_bytes[at:] if at else made.chosen.tier_bytes[:1]
        seconds = made.network.ranks / made.network.children(at) * sum(crossing) / level.bandwidth
        busy = seconds / made.chosen.seconds if made.chosen.seconds else 0.0
        messages = made.chosen.tier_messages[at]
        rows.append(
            (
                level.name,
                f"{messages:,.0f}" if messages >= 1000 else f"{messages:.4g}",
                format_size(made.chosen.tier_bytes[at]),
                f"{busy:.0%} of the time",
            )
        )
    return _table(rows, left=1)


def _table(rows: Sequence[tuple[str, ...]], left: int) -> str:
    """Aligned columns: the first `left` of them flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at < left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
