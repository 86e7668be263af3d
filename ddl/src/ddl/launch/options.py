"""Ask: the options of ddlrun's command line.

Options have one dash or two, as the original's had, and stand before the program. The program is the first word that is
not an option, or the word after `--`; the words after it are the program's own.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from pathlib import Path

import ddl
from ddl.launch.arguments import Parser, count, read
from ddl.launch.console import show
from ddl.launch.counts import quoted, whole
from ddl.launch.errors import UsageError

COMMANDS = ("doctor",)  # the commands that take these options; bench and plan have options of their own
MODES = "bnrmp"
DIMENSIONS = 4  # ranks a host, hosts a rack, racks, aisles: ddlrun's default
ORDERS = ("ranks", "hosts")
START_SECONDS = 60  # for mpirun to start the next program on a host


@dataclass(frozen=True)
class Mode:
    """How the dimensions are reduced: one letter for all or one for each, and their sizes if the user gave sizes."""

    letters: str = "p"
    dimensions: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.letters + (f":{'x'.join(map(str, self.dimensions))}" if self.dimensions else "")


@dataclass(frozen=True)
class Export:
    """A variable for every rank; `value` None takes the one that ddlrun has.

    A `secret` value reaches the ranks through the environment and is never printed.
    """

    name: str
    value: str | None = None
    secret: bool = False


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)

MEASURED = Mode()  # the default; `-m p` makes an equal Mode that is another object, so the two can be told apart


def parse_mode(text: str) -> Mode:
    """`MODES[:AxBxC...]` as in DDL_OPTIONS. Raises ValueError."""
    letters, colon, sizes = text.partition(":")
    if letters == "c":
        raise ValueError(f"{text!r}: mode c (RCS) of the original is not built; expected b, n, r, m or p")
    if not letters or set(letters) - set(MODES):
        raise ValueError(
            f"{quoted(text)}: unknown mode {quoted(letters)}; expected b (NCCL point-to-point), n (NCCL), r (ring), "
            "m (MPI) or p (measured), one for all dimensions or one for each"
        )
    try:
        dimensions = tuple(map(whole, sizes.split("x"))) if colon else ()
    except ValueError as error:
        raise ValueError(f"{quoted(text)}: expected dimensions, such as p:4x2x1x1: {error}") from None
    sizes_known = len(dimensions) if colon else DIMENSIONS
    if len(letters) not in (1, sizes_known):
        raise ValueError(
            f"{quoted(text)}: {len(letters)} modes for {sizes_known} dimensions; expected one for all, or one for each"
        )
    return Mode(letters, dimensions)


def _text(text: str) -> str:
    if not text:
        raise ValueError("the value is empty")
    return text


def _path(text: str) -> Path:
    return Path(_text(text))


def _address(text: str) -> str:
    try:
        return str(ip_address(text))
    except ValueError:
        raise ValueError(f"{quoted(text)}: expected an IP address, such as 127.0.0.1 or 0.0.0.0") from None


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ValueError(f"{text!r}: not words of a shell: {error}") from None


def _export(text: str) -> Export:
    variable, equals, value = text.partition("=")
    if not _VARIABLE.fullmatch(variable):  # the message leaves out the value: it may be secret
        raise ValueError(f"{quoted(variable)}: not a variable name; expected VAR or VAR=VALUE")
    return Export(variable, value, secret=True) if equals else Export(variable)


def check_ddl_words(words: Sequence[str], name: str) -> None:
    """Raise UsageError, which names `name`, unless `words` are names and values, as DDL_OPTIONS has them."""
    for at in range(0, len(words), 2):
        if not words[at].startswith("-"):
            raise UsageError(
                f"{name}: {quoted(words[at])} is not an option of libddl; expected names and values, such as "
                f"{name}='-dbg_level 1'"
            )
        if at + 1 == len(words):
            raise UsageError(f"{name}: {quoted(words[at])} has no value; expected one after it, such as -dbg_level 1")


@dataclass(frozen=True)
class Options:
    """The options of ddlrun. It chooses the fields that are None or empty, and prints its reasons with --verbose."""

    hosts: str | None = None
    hostfile: Path | None = None
    tcp: bool = False
    mpirun: Path | None = None
    ranks: int | None = None
    accelerators: int | None = None
    nodes: int | None = None
    racks: int | None = None
    aisles: int | None = None
    order: str = "ranks"
    rankfile: Path | None = None
    mode: Mode = MEASURED
    ddlargs: tuple[str, ...] = ()
    no_ddloptions: bool = False
    mpiargs: tuple[str, ...] = ()
    exports: tuple[Export, ...] = ()
    restarts: int = 0
    start_timeout: int = START_SECONDS
    skipchecks: bool = False
    verbose: bool = False
    dry_run: bool = False
    rank_prefix: bool = False
    log_dir: Path | None = None
    tensorboard: Path | None = None
    metrics_port: int | None = None
    metrics_address: str | None = None
    command: str = "run"  # run, or one of COMMANDS
    program: tuple[str, ...] = ()

    @property
    def secrets(self) -> list[tuple[str, str]]:
        """Names and values of the secret variables."""
        return [(one.name, one.value) for one in self.exports if one.secret and one.value]


def add_options(parser: Parser) -> None:
    """Add the options that say where and how ranks run; an option that is not given sets no attribute."""

    def group(title: str) -> Callable[..., object]:
        return partial(parser.add_argument_group(title).add_argument, default=argparse.SUPPRESS)

    parser.add_argument("-h", "--help", action="store_true", default=argparse.SUPPRESS, help="print this")
    number, words = read(count), read(_words)
    # fmt: off
    add = group("where it runs")
    add("-H", "--host", "--hosts", dest="hosts", type=read(_text), metavar="HOST[:SLOTS],...",
        help="these hosts (default: the batch system's, else this one)")
    add("-hostfile", "--machinefile", dest="hostfile", type=read(_path), metavar="FILE",
        help="the hosts in FILE, one a line: HOST, HOST:SLOTS or HOST slots=N")
    add("--tcp", action="store_true", help="TCP between hosts, even if there is a faster fabric")
    add("--mpirun", type=read(_path), metavar="FILE", help="this mpirun (default: beside python, else on PATH)")

    add = group("the ranks and their shape")
    add("-np", "-n", dest="ranks", type=number, metavar="N",
        help="so many ranks (default: one a GPU; without GPUs the slots, else one a socket)")
    add("--accelerators", type=number, metavar="N", help="so many ranks on each host (default: its GPUs)")
    add("--nodes", type=number, metavar="N", help="hosts in a rack (default: hosts / racks / aisles)")
    add("--racks", type=number, metavar="N", help="racks in an aisle (default: 1)")
    add("--aisles", type=number, metavar="N", help="aisles (default: 1)")
    add("--order", choices=ORDERS, metavar="ranks|hosts",
        help="number the ranks host after host (ranks, the default) or go round the hosts (hosts)")
    add("-rf", "--rankfile", type=read(_path), metavar="FILE", help="place the ranks as FILE says: rank N=HOST slot=S")

    add = group("what they get")
    add("-m", "--mode", type=read(parse_mode), metavar="MODE[:AxBxC]",
        help="how DDL reduces: b, n, r, m or p; one for all dimensions or one for each (default p: measured)")
    add("--ddlarg", "--ddloption", "--ddlargs", dest="ddlargs", action="extend", type=words, metavar='"..."',
        help="more for DDL_OPTIONS")
    add("--no_ddloptions", action="store_true", help="leave DDL_OPTIONS alone")
    add("--mpiarg", "--mpiargs", dest="mpiargs", action="extend", type=words, metavar='"..."', help="more for mpirun")
    add("-x", dest="exports", action="append", type=read(_export), metavar="VAR[=VALUE]",
        help="give the ranks this variable (PATH, LD_LIBRARY_PATH, PYTHONPATH, CUDA_VISIBLE_DEVICES, DDL_* and NCCL_* "
        "are passed by default)")
    add("--restarts", type=read(partial(count, least=0)), metavar="N", help="restart a failed job, up to N times")
    add("--start-timeout", type=number, metavar="SECONDS", help="how long the next host or rank may take to begin, "
        f"before the start is given up (default {START_SECONDS})")

    add = group("what is shown and checked")
    add("--skipchecks", action="store_true", help="look at no other host first")
    add("-v", "--verbose", action="store_true", help="print each choice with its reason, and the command")
    add("--dry-run", action="store_true", help="print what would be run, and run nothing")
    add("--rank-prefix", action="store_true", help="the rank before each line of output")
    add("--log-dir", type=read(_path), metavar="DIR", help="keep the run's folder in DIR (default: see the manual)")

    add = group("figures of each rank, once a second")
    add("--tensorboard", type=read(_path), metavar="DIR", help="event files for TensorBoard, a folder in DIR each rank")
    add("--metrics-port", type=read(partial(whole, most=65535)), metavar="N",
        help="for Prometheus: a port on each host, which its ranks share")
    add("--metrics-address", type=read(_address), metavar="IP",
        help="open it at this address of each host (default 127.0.0.1; 0.0.0.0: all of them)")
    # fmt: on


def made(given: argparse.Namespace, **more: object) -> Options:
    """Make Options of what was parsed. Raises UsageError."""
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in vars(given).items()}
    options = Options(**values, **more)  # type: ignore[arg-type]  # each type is its field's
    if options.hosts is not None and options.hostfile is not None:
        raise UsageError("-H and -hostfile: both name the hosts; give one of them")
    check_ddl_words(options.ddlargs, "--ddlarg")
    return options


def parse(argv: Sequence[str]) -> Options | None:
    """Parse a command line without its `ddlrun`; None if it asked for help or the version, which are then printed.

    Raises UsageError.
    """
    parser = _parser()
    given, program = parser.parse_start(argv)
    command = "run"
    if program and program[0] in COMMANDS:
        command, *rest = program
        given, program = parser.parse_start(rest, given)
    for name, text in (("help", parser.format_help()), ("version", f"ddlrun {ddl.__version__}\n")):
        if hasattr(given, name):
            show(text.rstrip("\n"))
            return None
    program = program[program[:1] == ["--"] :]
    if command == "run" and not program:
        raise UsageError("PROGRAM: none given; expected a program to run, as in `ddlrun python train.py`")
    if command == "doctor" and program:
        raise UsageError(f"ddlrun doctor runs no program, and was given {shlex.join(program)!r}")
    return made(given, command=command, program=tuple(program))


_USAGE = """\
ddlrun [OPTIONS] PROGRAM [ARGS...]
       ddlrun doctor [OPTIONS]
       ddlrun bench | plan ..."""
_HEAD = """\
Run PROGRAM on every GPU (or socket) of the hosts, as ranks of one job. The ranks find RANK, LOCAL_RANK, WORLD_SIZE,
LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in their environment, as under torchrun, and DDL_OPTIONS for libddl.
A PROGRAM that is a Python file and not executable is run with this python. Options have one dash or two.
"""
_TAIL = """\
commands:
  doctor                  check the hosts and print what was found; run nothing
  bench                   time allreduces, beside their bound and beside other libraries (ddlrun bench --help)
  plan                    simulate an allreduce on a described network (ddlrun plan --help)

examples:
  ddlrun python train.py --epochs 3           every GPU of the batch system's hosts, or of this one
  ddlrun -H host1,host2 python train.py       ... of these two
  ddlrun -np 4 python train.py                four ranks
  ddlrun -H host1,host2 --dry-run train.py    the mpirun command that this would be
  ddlrun doctor -hostfile hosts.txt           are these hosts fit for it?

exit status: the program's own; 1 a host was lost or a rank did not report its end, 2 wrong usage, 3 a check failed
(2 and 3: nothing was run), 128 + N ended by signal N
"""


def _parser() -> Parser:
    parser = Parser("ddlrun", usage=_USAGE, description=_HEAD, epilog=_TAIL)
    add_options(parser)
    parser.add_argument("--version", action="store_true", default=argparse.SUPPRESS, help="print ddl's version")
    return parser
