"""The command line of `ddlrun bench`: its own options; all others are ddlrun's and say where the ranks run."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddl.bench.figures import Links
from ddl.launch import options as launch
from ddl.launch.errors import UsageError

_UNITS = {"": 1, "b": 1, "k": 10, "kib": 10, "m": 20, "mib": 20, "g": 30, "gib": 30}
_RATES = {"kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8}
SIZES = "1KiB..64MiB"

_TEXT = """\
Time DDL's allreduce of float32 sums over sizes, and print for each: time, algorithm bandwidth (bytes / time), bus
bandwidth (2 (n-1)/n x bytes / time) and, where the links are known (--links), the share of the least time that any
algorithm needs. With --compare the peers that are installed take turns with it in the same run: Open MPI with its
default and with the settings that its users tune by, MPICH, gloo (torch), and one flat ring.
All other options are those of ddlrun and say where the ranks run: see `ddlrun --help`.
"""
_EXAMPLES = """\
examples:
  ddlrun bench -np 2                                      on this host, 2 ranks
  ddlrun bench -H host1,host2,host3,host4 --compare       on four hosts, beside the peers
  ddlrun bench -H host1,host2 --sizes 25MiB --plot a.png  one size (DDP's bucket), with a picture
"""


@dataclass(frozen=True)
class Bench:
    """What is to be timed, and where the figures go."""

    launch: launch.Options
    compare: bool
    sizes: tuple[int, ...]
    rounds: int
    seconds: float
    links: Links | None
    peer_mpis: tuple[Path, ...]
    only: str | None
    output: Path | None
    plot: Path | None


def parse(words: Sequence[str]) -> Bench | None:
    """The options of `ddlrun bench`; None where --help was asked for and printed. Raises UsageError."""
    if set(words) & {"-h", "--help", "-help"}:
        _parser().print_help()
        return None
    try:
        own, rest = _parser().parse_known_args(list(words))
    except argparse.ArgumentError as error:
        raise UsageError(f"ddlrun bench: {error}") from None
    given = launch.parse([*rest, "--", "bench"])
    if given.program != ("bench",):
        raise UsageError(f"ddlrun bench runs no program, and was given {' '.join(given.program[:-1])!r}")
    return Bench(
        launch=given,
        compare=own.compare,
        sizes=sizes(own.sizes),
        rounds=own.rounds,
        seconds=own.seconds,
        links=None if own.links is None else links(own.links),
        peer_mpis=tuple(own.peer_mpi),
        only=own.only,
        output=own.json,
        plot=own.plot,
    )


def sizes(text: str) -> tuple[int, ...]:
    """`1KiB..64MiB` (every fourth power of two between) or `1KiB,25MiB`. Raises UsageError."""
    if ".." in text:
        first, last = map(_bytes, text.split("..", 1))
        found = []
        while first < last:
            found.append(first)
            first *= 4
        return (*found, last)
    return tuple(map(_bytes, text.split(",")))


def links(text: str) -> Links:
    """`HOSTSxRATE` or `RACKSxHOSTSxRATE/UPLINK`, as in 4x191mbit or 2x2x191mbit/95mbit. Raises UsageError."""
    found = re.fullmatch(r"(?:(\d+)x)?(\d+)x([\d.]+)([kmg]bit)(?:/([\d.]+)([kmg]bit))?", text.lower())
    if found is None or (found[1] is None) != (found[5] is None) or not int(found[2]):
        raise UsageError(
            f"--links={text!r}: expected HOSTSxRATE, as 4x191mbit, or RACKSxHOSTSxRATE/UPLINK, as 2x2x191mbit/95mbit: "
            "what a program gets of each host's link, and of each rack's"
        )
    racks, hosts = int(found[1] or 1), int(found[2])
    uplink = float(found[5]) * _RATES[found[6]] if found[5] else None
    return Links(racks * hosts, float(found[3]) * _RATES[found[4]], racks, uplink)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)\s*([a-z]*)", text.strip().lower())
    if found is None or found[2] not in _UNITS or int(found[1]) < 1:
        raise UsageError(f"--sizes={text!r}: expected sizes such as 1KiB, 25MiB, or a range 1KiB..64MiB")
    unit = _UNITS[found[2]]
    size = int(found[1]) << unit if unit > 1 else int(found[1])
    return max(4, size // 4 * 4)  # whole float32


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "ddlrun bench", usage="ddlrun bench [OPTIONS] [OPTIONS OF DDLRUN]", description=_TEXT, epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, exit_on_error=False,
    )  # fmt: skip
    parser.add_argument("--compare", action="store_true", help="time the peers that are installed, too")
    parser.add_argument("--sizes", default=SIZES, metavar="A..B|A,B,...", help=f"bytes, in units (default {SIZES})")
    parser.add_argument("--rounds", type=_positive(int), default=5, metavar="N", help="turns of each (default 5)")
    parser.add_argument(
        "--seconds", type=_positive(float), default=0.5, metavar="S", help="of a turn, at least (default 0.5)"
    )
    parser.add_argument("--links", metavar="LINKS", help="what the links carry: 4x191mbit, or 2x2x191mbit/95mbit")
    parser.add_argument(
        "--peer-mpi", type=Path, action="append", default=[], metavar="FILE", help="the mpirun of another MPI to time"
    )
    parser.add_argument("--only", metavar="REGEX", help="of the peers, those whose name matches")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every figure, with machine and versions")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="a picture (.png or .svg): time against size")
    return parser


def _positive(kind: type) -> object:
    def read(text: str) -> float:
        if not (value := kind(text)) > 0:
            raise ValueError
        return value

    read.__name__ = f"{kind.__name__} above 0"  # argparse says: invalid int above 0 value
    return read
