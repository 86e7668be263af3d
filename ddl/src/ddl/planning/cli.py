"""`ddlrun plan`: simulate an allreduce on a described network. Runs nothing."""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ddl import elements
from ddl.errors import ArgumentError, DDLError
from ddl.launch import arguments
from ddl.launch.arguments import read
from ddl.launch.console import show
from ddl.launch.errors import LaunchError, UsageError
from ddl.launch.output import output_file
from ddl.planning import interface, network, picture, published, report, scaling, units
from ddl.planning.interface import Plan
from ddl.planning.network import Network

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DESCRIPTION = """\
Simulate an allreduce on a network that is only described; run nothing. The schedules are those that libddl would
execute; the times are simulated and leave out other work of the processors.

A network is a tree: ranks in a host, hosts in a rack, racks in an aisle, aisles. Each has one link to the switch above,
with a rate in each direction and a latency, and all that is below a link shares it. NETWORK is a file (.toml, .json) or
a machine of the catalogue; flags change it, or describe a network by themselves.
"""

_EPILOG = """\
examples:
  ddlrun plan --hosts 4 --ranks 2 --racks 2 --link 200mbit --uplink 100mbit --size 64MiB
  ddlrun plan ac922-4 --hosts 64 --size 100MB       64 hosts of the catalogue, 4 GPUs each
  ddlrun plan ac922-4 --hosts 64 -m r:256           one ring over all GPUs
  ddlrun plan --hosts 64 --ranks 64 --odd host7=1gbit   one slow link; --odd host0-31=48: uneven hosts
  ddlrun plan network.toml --schedule --rank 3      the steps of rank 3
  ddlrun plan hgx-h100 --hosts 128 --plot times.svg
  ddlrun plan --scaling                             ResNet-50 on 4 to 256 GPUs, beside the published figures

Rates are what programs get: of Ethernet with frames of 1500 bytes, TCP delivers 95.6% of the wire's bits. They are
bits (200mbit, 100 Gbit/s) or bytes a second (12.5GB/s); times are 5us, 0.1ms; sizes 64MiB, 100MB.
"of the bound": the time that any algorithm needs at least, over the plan's; algorithm bandwidth: size / time;
bus bandwidth: that times 2 (n-1)/n, what each rank sends. Each bound comes with its witness: which bytes must pass
through which links. Up to 64 ranks, ForestColl's optimum is one of them (needs scipy: pip install './ddl[plan]').
"""

UNSCALED = (  # options that --scaling does not take
    *("ranks", "hosts", "racks", "aisles", "uplink", "aisle_link", "odd"),
    *("size", "type", "mode", "chunks", "schedule", "rank"),
)


def main(words: Sequence[str]) -> int:
    """Run `ddlrun plan WORDS`; returns the exit status. Raises LaunchError."""
    parser = _parser()
    if not {"-h", "-help", "--help"}.isdisjoint(words):
        show(parser.format_help())
        return 0
    asked = parser.parse_args(words)
    if asked.list:
        _list_machines()
        return 0
    if asked.published:
        return _published(asked, words)
    try:
        if asked.plot:
            picture.check(asked.plot)
        if asked.scaling:
            _refuse(parser.parse_args(words, argparse.Namespace(**dict.fromkeys(UNSCALED))))
            return _scaling(asked)
        return _plan(asked)
    except (network.DescriptionError, picture.PictureError, ArgumentError) as error:
        raise UsageError(f"plan: {error}") from None
    except DDLError as error:
        raise LaunchError(f"plan: {error}") from None


def _refuse(asked: argparse.Namespace) -> None:
    """Raises UsageError for an option that --scaling does not take; options that were not given are None in `asked`."""
    for field in UNSCALED:
        if getattr(asked, field) is not None:
            raise UsageError(
                f"plan: --{field.replace('_', '-')} is not for --scaling, whose table sets hosts, gradients and plans "
                "by itself; NETWORK, --inside, --link, --latency and --reduce describe its machine"
            )


def _plan(asked: argparse.Namespace) -> int:
    described = _network(asked)
    plan = None if asked.mode is None and asked.chunks is None else Plan(asked.mode, asked.chunks or 0)
    with _interruptible():
        made = report.study(described, asked.size, asked.type, plan)
    steps = None
    if asked.schedule:
        # The library's choice, unless a plan was given.
        shown = plan or Plan(mode=made.chosen.plan)
        count = max(1, asked.size // elements.TYPES[asked.type].nbytes)
        with _interruptible():
            steps = interface.schedule(described.tree, count, asked.rank, asked.type, shown)
    if asked.json:
        document = report.to_dict(made)
        if steps is not None:
            document["schedule"] = {"rank": asked.rank, "steps": list(map(asdict, steps))}
        show(json.dumps(document, indent=2))
    else:
        show(report.to_text(made))
        if steps is not None:
            show("\n" + report.steps_to_text(steps, asked.rank, described))
    if asked.plot:
        _write(picture.draw_times(described, asked.type, plan), asked.plot)
    return 0


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C ends this process at once: Python's handler would wait for libddl, which may simulate for minutes."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _scaling(asked: argparse.Namespace) -> int:
    described = _network(asked, network.load("minsky"))
    with _interruptible():
        table = scaling.study(described)
    show(json.dumps(scaling.to_dict(table), indent=2) if asked.json else scaling.to_text(table))
    if asked.plot:
        _write(picture.draw_scaling(scaling.curves(table), scaling.TITLE, scaling.GPUS[0]), asked.plot)
    return 0


def _published(asked: argparse.Namespace, words: Sequence[str]) -> int:
    if {word.lstrip("-") for word in words} - {"published", "json"}:
        raise UsageError("plan: --published has its own machines: it goes with --json alone")
    with _interruptible():
        rows = published.study()
    show(json.dumps(published.to_dict(rows), indent=2) if asked.json else published.to_text(rows))
    return 0


def _write(figure: Figure, path: Path) -> None:
    try:
        picture.write(figure, path)
    except OSError as error:
        raise LaunchError(f"plan: {path} could not be written: {error.strerror}") from None


def _network(asked: argparse.Namespace, default: Network = network.DEFAULT) -> Network:
    made = network.changed(
        default if asked.network is None else network.load(asked.network),
        ranks=asked.ranks,
        hosts=asked.hosts,
        racks=asked.racks,
        aisles=asked.aisles,
        rates=(asked.inside, asked.link, asked.uplink, asked.aisle_link),
        latencies=asked.latency,
    )
    made = network.with_odd(made, asked.odd or ())
    return replace(made, reduce=asked.reduce) if asked.reduce else made


def _list_machines() -> None:
    names = network.machines()
    width = max(map(len, names))
    for name in names:
        one = network.load(name)
        show(f"{name:{width}}  {one.name}")
        for level in one.levels:
            show(f"{'':{width}}    {level.name}: {level.source}")
        if one.source:
            show(f"{'':{width}}    {one.source}")


def _parser() -> argparse.ArgumentParser:
    parser = arguments.Parser("ddlrun plan", description=_DESCRIPTION, epilog=_EPILOG)
    add = parser.add_argument
    add("network", nargs="?", metavar="NETWORK", help="a file (.toml, .json), or a machine that --list names")
    add("-h", "--help", action="store_true", help="print this")
    add("--list", action="store_true", help="list the catalogue of machines with the sources of their figures")

    rate, count = read(units.parse_rate), read(arguments.count)
    add = parser.add_argument_group("the network").add_argument
    add("--ranks", type=count, metavar="N", help="ranks, or GPUs, in a host (default 1)")
    add("--hosts", type=count, metavar="N", help="hosts in all (default 1)")
    add("--racks", type=count, metavar="N", help="racks in an aisle (default 1)")
    add("--aisles", type=count, metavar="N", help="aisles (default 1)")
    add("--inside", type=rate, metavar="RATE", help="of a rank's link inside its host (default 5GB/s)")
    add("--link", type=rate, metavar="RATE", help="of a host's link to its rack (default 10gbit)")
    add("--uplink", type=rate, metavar="RATE", help="of a rack's link (default: all that its hosts can send)")
    add("--aisle-link", type=rate, metavar="RATE", help="of an aisle's link (default: all that its racks can send)")
    add(
        "--latency", type=read(_latencies), default=(), metavar="T,...",
        help="of a message inside a host, then between hosts, racks, aisles (default 1us,30us, ...)",
    )  # fmt: skip
    add(
        "--odd", action="append", type=read(network.parse_odd), metavar="WHAT",
        help="unlike the others: host7=1gbit (its link), host0-3=2 (their ranks), rack1=3,10gbit; may be repeated",
    )  # fmt: skip
    add("--reduce", type=rate, metavar="RATE", help="bytes that a rank adds in a second (default: it takes no time)")

    add = parser.add_argument_group("the allreduce").add_argument
    add("--size", type=read(units.parse_size), default=64 << 20, metavar="SIZE", help="of the buffer (default 64MiB)")
    add("--type", choices=list(elements.TYPES), default="float32", help="of its elements (default float32)")
    add("-m", "--mode", metavar="MODE[:AxBxC]", help="these dimensions, as in DDL_OPTIONS (default: the best)")
    add("--chunks", type=count, metavar="N", help="cut the buffer into N pieces (default: by size)")

    add = parser.add_argument_group("what is shown").add_argument
    add("--schedule", action="store_true", help="print the steps of one rank, too")
    add(
        "--rank",
        type=read(lambda text: arguments.count(text, least=0)),
        default=0,
        metavar="N",
        help="that rank (default 0)",
    )
    add("--json", action="store_true", help="print JSON: seconds, bytes, bytes a second")
    add(
        "--plot", type=read(output_file), metavar="FILE",
        help="draw time against size for each plan (.png or .svg)",
    )  # fmt: skip
    add("--scaling", action="store_true", help="simulate training of ResNet-50 on 4 to 256 GPUs of NETWORK instead")
    add("--published", action="store_true", help="forecast published systems, beside what was published of them")
    return parser


def _latencies(text: str) -> tuple[float, ...]:
    times = tuple(units.parse_time(word) for word in text.split(","))
    if len(times) > len(network.NAMES):
        raise ValueError(f"{text!r}: expected at most {len(network.NAMES)} times: {', '.join(network.NAMES)}")
    return times
