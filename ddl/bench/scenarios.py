"""The scenarios of the allreduce: clusters, ranks, sizes and targets. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from runs import Scenario

LARGE = 64 << 20
SMALL = (1 << 10, 4 << 10, 16 << 10, 64 << 10)


@dataclass(frozen=True)
class Target:
    """A figure and its limit; `about` names what it is compared with."""

    figure: str  # "bound": our time over the bound's; "ratio": the other's over ours; "small"; "order"
    value: float
    about: str = ""  # a prefix of contestants' names; the fastest match counts


@dataclass(frozen=True)
class Allreduce(Scenario):
    """One run of `ddlrun bench`, or several."""

    sizes: str = "1KiB..64MiB"
    seconds: float = 0.5
    compare: bool = True
    only: str = ""  # of the peers, those whose name matches this regular expression
    orders: tuple[tuple[int, ...], ...] = ()  # orders of the hosts; each is run in turn, `rounds` times
    targets: tuple[Target, ...] = ()


_SMALL = tuple(Target("small", size) for size in SMALL)

ALL = (
    Allreduce(
        "host", "one host, a rank on each of its 2 cores: shared memory", racks=(), ranks=2,
        seconds=1.0, targets=_SMALL,
    ),
    Allreduce(
        "pair", "2 hosts x 1 rank (a rank a core)", racks=(2,), ranks=1,
        sizes="1KiB..64KiB", seconds=1.0, targets=_SMALL,
    ),
    Allreduce(
        "fast", "2 hosts x 1 rank, links so fast that the processors decide", racks=(2,), ranks=1, link="20gbit",
        sizes="64KiB..16MiB", rounds=3, targets=tuple(Target("small", size) for size in (64 << 10, 1 << 20, 16 << 20)),
    ),
    Allreduce(
        "switch", "4 hosts x 2 ranks on one switch", racks=(4,), ranks=2, rounds=3,
        targets=(
            *_SMALL, Target("bound", 1.02), Target("ratio", 1.08, "gloo"), Target("ratio", 1.8, "Open MPI, default"),
        ),
    ),
    Allreduce(
        "racks", "2 racks x 2 hosts x 2 ranks", racks=(2, 2), ranks=2, rounds=3,
        targets=(*_SMALL, Target("bound", 1.04), Target("ratio", 1.5, "gloo"), Target("ratio", 1.5, "Open MPI")),
    ),
    Allreduce(
        "order", "2 racks x 2 hosts x 2 ranks, hosts given in the best and in the worst order", racks=(2, 2), ranks=2,
        rounds=3, sizes="64MiB", compare=False, orders=((0, 1, 2, 3), (0, 2, 1, 3)), targets=(Target("order", 1.05),),
    ),
)  # fmt: skip


def quick(scenario: Allreduce) -> Allreduce:
    """A small version of the scenario: it shows that it runs; its figures mean nothing."""
    largest = "256KiB" if scenario.sizes.endswith("64MiB") else "4KiB"
    sizes = largest if ".." not in scenario.sizes else f"1KiB..{largest}"
    return replace(scenario, sizes=sizes, rounds=2, seconds=0.05, link="1gbit", uplink="500mbit", targets=())
