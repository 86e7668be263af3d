"""The command line of `ddlrun bench`: options of its own, and ddlrun's, which say where the ranks run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path

from ddl.launch import options as launch
from ddl.launch.arguments import Parser, count, read
from ddl.launch.console import show
from ddl.launch.errors import UsageError
from ddl.launch.output import output_file
from ddl.planning import network, picture, units
from ddl.planning.network import Network

SIZES = "1KiB..64MiB"
REFUSED = {  # ddlrun's options that have no meaning here, by the field that each sets
    "dry_run": ("--dry-run", "a benchmark runs; `ddlrun --dry-run PROGRAM` prints the command of a job"),
    "restarts": ("--restarts", "a job that fails is left out, and never started again"),
    "rank_prefix": ("--rank-prefix", "what the ranks print is not shown"),
    "log_dir": ("--log-dir", "no run's folder is kept; --json FILE keeps every figure, with what libddl said"),
}

_TEXT = """\
Time DDL's allreduce of float32 sums over sizes, and print for each: time, algorithm bandwidth (bytes / time), bus
bandwidth (2 (n-1)/n x bytes / time) and, if --network describes the network, the share of the least time that
any algorithm needs on it. With --compare the peers that are installed take turns with it in the same run: Open MPI with
its default and with the settings that its users tune by, MPICH, gloo (torch), and one flat ring.
Not for the benchmark are --dry-run, --restarts, --rank-prefix and --log-dir.
"""
_EXAMPLES = """\
examples:
  ddlrun bench -np 2                                      on this host, 2 ranks
  ddlrun bench -H host1,host2,host3,host4 --compare       on four hosts, beside the peers
  ddlrun bench -H host1,host2 --sizes 25MiB --plot a.png  one size (DDP's bucket), with a picture
"""


@dataclass(frozen=True)
class Bench:
    """The options of a benchmark."""

    launch: launch.Options
    compare: bool
    sizes: tuple[int, ...]
    rounds: int
    seconds: float
    network: Network | None
    peer_mpi: list[Path]
    only: re.Pattern[str] | None
    json: Path | None
    plot: Path | None


def parse(words: Sequence[str]) -> Bench | None:
    """Parse the options of `ddlrun bench`; None after printing --help. Raises UsageError."""
    parser = _parser()
    given, rest = parser.parse_start(words)
    if hasattr(given, "help"):
        show(parser.format_help().rstrip("\n"))
        return None
    if rest:
        raise UsageError(f"ddlrun bench runs no program, and was given {' '.join(rest)!r}")
    own = {name: vars(given).pop(name) for name in Bench.__dataclass_fields__ if name in given}
    for option in ("only", "peer_mpi"):
        if own[option] and not own["compare"]:
            raise UsageError(
                f"bench: --{option.replace('_', '-')} is about the peers, which are timed with --compare; add it"
            )
    for field, (option, why) in REFUSED.items():
        if field in given:
            raise UsageError(f"bench: {option} is not for the benchmark: {why}")
    if own["plot"] is not None:
        picture.check(own["plot"])
    return Bench(launch.made(given), **own)


def sizes(text: str) -> tuple[int, ...]:
    """`1KiB..64MiB` (steps of 4) or `1KiB,25MiB`, in whole float32. Raises ValueError."""
    first, between, last = text.partition("..")
    if not between:
        return tuple(max(4, units.parse_size(word) // 4 * 4) for word in text.split(","))
    size, most = max(4, units.parse_size(first) // 4 * 4), units.parse_size(last) // 4 * 4
    if size > most:
        raise ValueError(f"{text!r}: expected the smaller size first")
    found = []
    while size < most:
        found.append(size)
        size *= 4
    return (*found, most)


def _parser() -> Parser:
    parser = Parser("ddlrun bench", usage="ddlrun bench [OPTIONS]", description=_TEXT, epilog=_EXAMPLES)
    add, file = parser.add_argument_group("what is timed").add_argument, read(output_file)
    # fmt: off
    add("--compare", action="store_true", help="time the peers that are installed, too")
    add("--sizes", type=read(sizes), default=SIZES, metavar="A..B|A,B,...", help=f"in steps of 4 (default {SIZES})")
    add("--rounds", type=read(count), default=5, metavar="N", help="turns of each (default 5)")
    add("--seconds", type=read(_seconds), default=0.5, metavar="S", help="of a turn, at least (default 0.5)")
    add("--network", type=read(network.load), metavar="NETWORK",
        help="what the links carry: a file, as `ddlrun plan` reads it")
    add("--peer-mpi", type=Path, action="append", default=[], metavar="FILE", help="the mpirun of another MPI to time")
    add("--only", type=read(_pattern), metavar="REGEX", help="of the peers, those whose name matches")
    add("--json", type=file, metavar="FILE", help="every figure, with machine and versions")
    add("--plot", type=file, metavar="FILE", help="a picture (.png or .svg): time against size")
    # fmt: on
    launch.add_options(parser)
    return parser


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r}: expected a regular expression: {error}") from None


def _seconds(text: str) -> float:
    with suppress(ValueError):
        if 0 < (seconds := float(text)) < inf:
            return seconds
    raise ValueError(f"{text!r}: expected seconds above 0")
