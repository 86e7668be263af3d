"""`lms link`: its commands and their options."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lms.errors import LMSError
from lms.link.profile import Kind

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

MEASURED = ("memory", "file", "gpu", "peer")  # the kinds that `measure` knows; a network is `ddlrun bench`'s


def add(commands: Commands) -> None:
    """Add `link` and its commands to the command line of `lms`."""
    parser = commands.add_parser(
        "link",
        help="measure this machine's links, show them, compare machines",
        description="Links: GPU to host, memory to a file, GPU to GPU. docs/links.md defines each figure.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    below = parser.add_subparsers(metavar="COMMAND", required=True, title="commands")
    _add_measure(below)


def _add_measure(commands: Commands) -> None:
    parser = _command(
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
    parser.add_argument("--quick", action="store_true", help="less than 10 s: fewer sizes, up to 256 MiB")
    parser.add_argument("-o", "--output", metavar="FILE.json", type=Path, help="write the figures: for show, compare")
    parser.add_argument(
        "--dir", metavar="DIR", type=Path, help="folder whose disk is measured (default: the temporary folder)"
    )
    parser.add_argument("--only", metavar="KINDS", type=_kinds, default=(), help=f"some of {','.join(MEASURED)}")
    parser.add_argument("--name", default="", help="what the machine is called in comparisons (default: its host name)")
    parser.set_defaults(action=_measure)


def _command(commands: Commands, name: str, text: str, description: str, epilog: str) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=text,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def _kinds(text: str) -> tuple[Kind, ...]:
    kinds = tuple(filter(None, (word.strip() for word in text.split(","))))
    if not kinds or set(kinds) - set(MEASURED):
        raise argparse.ArgumentTypeError(f"{text!r}: expected some of {', '.join(MEASURED)}, separated by commas")
    return cast("tuple[Kind, ...]", kinds)


def _measure(args: argparse.Namespace) -> int:
    from lms.cli import check_output
    from lms.link import table
    from lms.link.measure import measure

    check_output("--output", args.output)
    folder = args.dir if args.dir is not None else Path(tempfile.gettempdir())
    profile = measure(folder, quick=args.quick, kinds=args.only, name=args.name)
    if args.output is not None:
        write("--output", args.output, profile.save)
    print(table.text(profile))
    return 0


def write(option: str, path: Path, save: Callable[[Path], None]) -> None:
    """Let `save` write `path`. Raises LMSError that names the option when the file system refuses."""
    try:
        save(path)
    except OSError as error:
        raise LMSError(f"{option}={str(path)!r}: not written: {error.strerror}") from None
