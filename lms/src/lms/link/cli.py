"""`lms link`: its commands and their options."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lms.command import command
from lms.drawing import encoded
from lms.errors import UsageError
from lms.files import check_output, tell
from lms.link.profile import Kind
from lms.trace import Trace

if TYPE_CHECKING:
    from lms.command import Commands

MEASURED = ("memory", "file", "gpu", "peer")  # the kinds that `measure` knows; a network is `ddlrun bench`'s


def add(commands: Commands) -> None:
    """Add `link` and its commands to the command line of `lms`."""
    parser = command(
        commands,
        "link",
        "measure this machine's links, show them, compare machines",
        "Links: GPU to host, memory to a file, GPU to GPU. docs/links.md defines each figure.",
    )
    below = parser.add_subparsers(metavar="COMMAND", required=True, title="commands")
    _add_measure(below)
    _add_show(below)
    _add_compare(below)


def _add_measure(commands: Commands) -> None:
    parser = command(
        commands,
        "measure",
        "measure the links of this machine",
        "Copy 4 KiB to 1 GiB over each link of this machine and print what it carries: GPU to host memory and back\n"
        "(pinned and pageable), GPU to GPU, memory to a file and back past the page cache, copies within memory.\n"
        "It takes less than 60 s (--quick: 10 s), at most a quarter of the free memory and a tenth of the free disk.",
        "examples:\n"
        "  lms link measure\n"
        "  lms link measure --quick -o here.json\n"
        "  lms link measure --only file --dir /scratch\n",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="less than 10 s: up to 256 MiB, in memory at least twice the caches; a copy takes twice its size",
    )
    parser.add_argument("-o", "--output", metavar="FILE.json", type=Path, help="write the figures: for show, compare")
    parser.add_argument(
        "--dir", metavar="DIR", type=Path, help="folder whose disk is measured (default: the temporary folder)"
    )
    parser.add_argument("--only", metavar="KINDS", type=_kinds, default=(), help=f"some of {','.join(MEASURED)}")
    parser.add_argument("--name", default="", help="what the machine is called in comparisons (default: its host name)")
    parser.set_defaults(action=_measure)


def _add_show(commands: Commands) -> None:
    parser = command(
        commands,
        "show",
        "show this machine's links, or those in a file",
        "Each link by name: what it is, the most that it could carry, what was measured of it, and what stands in its\n"
        "way (a slot of 8 lanes, a link that is down, a slowed GPU), from the NVIDIA driver and the kernel.\n"
        "With PROFILE: what that file, or a machine of the catalogue, says.",
        "examples:\n  lms link show\n  lms link show --measured here.json --picture gpus.svg\n  lms link show gh200\n",
    )
    parser.add_argument("profile", metavar="PROFILE", nargs="?", help="what `measure -o` wrote, or a described machine")
    parser.add_argument("--json", action="store_true", help="as JSON (bytes, bytes a second)")
    parser.add_argument("--gpu", metavar="N", type=int, help="this GPU alone, by the driver's number")
    parser.add_argument("--dir", metavar="DIR", type=Path, help="folder whose disk is shown (default: temporary)")
    parser.add_argument("--measured", metavar="FILE.json", help="what `measure -o` wrote here: adds its figures")
    parser.add_argument("--picture", metavar="FILE", type=Path, help="draw the GPUs and what joins them (.svg or .png)")
    parser.set_defaults(action=_show)


def _add_compare(commands: Commands) -> None:
    from lms.link import catalogue

    parser = command(
        commands,
        "compare",
        "compare two machines, and a pass of a recorded step on each",
        "The links of two machines side by side and, with the trace of a step, what a pass of it would take on each,\n"
        "how long it would wait, and the largest batch. A and B are files that `lms link measure -o` wrote, records\n"
        "of `ddlrun bench --json`, or described machines:\n"
        f"  {', '.join(catalogue.names())}",
        "examples:\n"
        "  lms link compare ac922-4 pcie-3\n"
        "  lms link compare here.json gh200 --trace step.json --speedup 200 --picture compare.svg\n",
    )
    parser.add_argument("one", metavar="A", help="a file, or a described machine")
    parser.add_argument("other", metavar="B", help="the same")
    parser.add_argument("--trace", metavar="STEP.json", type=Path, help="a step that `lms run --trace` recorded")
    parser.add_argument(
        "--speedup", metavar="X", type=_factor, default=1.0, help="compute X times as fast as recorded (default 1)"
    )
    parser.add_argument("--json", metavar="FILE.json", type=Path, help="write the comparison as JSON")
    parser.add_argument("--picture", metavar="FILE", type=Path, help="draw it (.svg or .png)")
    parser.set_defaults(action=_compare)


def _factor(text: str) -> float:
    from lms.link.comparison import FASTEST  # here, because it loads NumPy

    try:
        factor = float(text)
    except ValueError:
        factor = 0.0
    if not 1 / FASTEST <= factor <= FASTEST:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number from {1 / FASTEST:f} to {FASTEST:.0f}")
    return factor


def _kinds(text: str) -> tuple[Kind, ...]:
    kinds = tuple(filter(None, (word.strip() for word in text.split(","))))
    if not kinds or set(kinds) - set(MEASURED):
        raise argparse.ArgumentTypeError(f"{text!r}: expected some of {', '.join(MEASURED)}, separated by commas")
    return cast("tuple[Kind, ...]", kinds)


def _measure(args: argparse.Namespace) -> int:
    from lms.link import table
    from lms.link.measure import measure

    check_output("--output", args.output)
    folder = args.dir if args.dir is not None else Path(tempfile.gettempdir())
    profile = measure(folder, quick=args.quick, kinds=args.only, name=args.name)
    return tell(table.text(profile), ("--output", args.output, lambda: profile.to_json().encode()))


def _show(args: argparse.Namespace) -> int:
    from lms.link import catalogue, chart, show, table

    if args.profile is not None:
        for option, given in (("--gpu", args.gpu), ("--measured", args.measured), ("--picture", args.picture)):
            if given is not None:
                raise UsageError(f"{option}: about this machine; without effect on PROFILE={args.profile!r}")
        profile = catalogue.load(args.profile)
        return tell(profile.to_json() if args.json else table.text(profile))
    if args.picture is not None:
        chart.check(args.picture)
        check_output("--picture", args.picture)
    folder = args.dir if args.dir is not None else Path(tempfile.gettempdir())
    measured = catalogue.load(args.measured) if args.measured is not None else None
    shown = show.this_machine(folder, only=args.gpu, measured=measured)
    if args.picture is not None and not shown.gpus:
        why = "; ".join(one.why for one in shown.profile.absent)
        raise UsageError(
            f"--picture={str(args.picture)!r}: there is no GPU to draw here ({why}); "
            "leave the option out to see the other links"
        )

    def picture() -> bytes:
        figure = chart.draw_topology(shown.gpus, shown.matrix, f"GPUs of {shown.profile.name}")
        return encoded(figure, args.picture.suffix)

    return tell(show.document(shown) if args.json else show.text(shown), ("--picture", args.picture, picture))


def _compare(args: argparse.Namespace) -> int:
    from lms.link import catalogue, chart, comparison_text
    from lms.link.comparison import compare

    one, other = catalogue.load(args.one), catalogue.load(args.other)
    if args.trace is None and args.speedup != 1.0:
        raise UsageError("--speedup: about a recorded step; without effect without --trace")
    trace = Trace.load(args.trace) if args.trace is not None else None
    check_output("--json", args.json)
    check_output("--picture", args.picture)
    if args.picture is not None:
        chart.check(args.picture)
    try:
        found = compare(one, other, trace, speedup=args.speedup)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return tell(
        comparison_text.text(found, speedup=args.speedup),
        ("--json", args.json, lambda: json.dumps(found.to_dict(), indent=1).encode() + b"\n"),
        (
            "--picture",
            args.picture,
            lambda: encoded(chart.draw_comparison(found, speedup=args.speedup), args.picture.suffix),
        ),
    )
