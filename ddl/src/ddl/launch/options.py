"""The whole command line of ddlrun: a table of its options, and what reads it.

Options are written with one or two dashes, as the original's were, and stand before the program; the first word that
is no option, or that comes after `--`, is the program, and what follows it is the program's own.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path

from ddl.launch.counts import quoted, whole
from ddl.launch.errors import UsageError

COMMANDS = ("doctor",)  # those that take these options; bench and plan have their own
MODES = "bnrmp"
DIMENSIONS = 4  # ranks a host, hosts a rack, racks, aisles: what ddlrun chooses where nobody gives any
ORDERS = ("ranks", "hosts")
START_SECONDS = 60  # for mpirun to start the next program on a host

Reader = Callable[[str, str], object]  # (value as given, the option as it was spelled) -> value


@dataclass(frozen=True)
class Mode:
    """How the dimensions are reduced: one letter for all or one for each, and their sizes where the user gave them."""

    letters: str = "p"
    dimensions: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.letters + (f":{'x'.join(map(str, self.dimensions))}" if self.dimensions else "")


@dataclass(frozen=True)
class Export:
    """A variable for every rank; `value` None takes the one that ddlrun has.

    The value of a `secret` one reaches the ranks through the environment, and is never shown.
    """

    name: str
    value: str | None = None
    secret: bool = False


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)

MEASURED = Mode()  # where nobody chooses; who says `-m p` has chosen an equal one, and not this


def parse_mode(text: str, name: str) -> Mode:
    """`MODES[:AxBxC...]` as in DDL_OPTIONS. Raises UsageError, which names the option `name`."""
    letters, colon, sizes = text.partition(":")
    if letters == "c":
        raise UsageError(f"{name}={text!r}: mode c (RCS) of the original is not built; expected b, n, r, m or p")
    if not letters or set(letters) - set(MODES):
        raise UsageError(
            f"{name}={quoted(text)}: unknown mode {quoted(letters)}; expected b (NCCL point-to-point), n (NCCL), "
            "r (ring), m (MPI) or p (measured), one for all dimensions or one for each"
        )
    try:
        dimensions = tuple(map(whole, sizes.split("x"))) if colon else ()
    except ValueError as error:
        raise UsageError(f"{name}={quoted(text)}: expected dimensions, such as p:4x2x1x1: {error}") from None
    sizes_known = len(dimensions) if colon else DIMENSIONS
    if len(letters) not in (1, sizes_known):
        raise UsageError(
            f"{name}={quoted(text)}: {len(letters)} modes for {sizes_known} dimensions; expected one for all, or one "
            "for each"
        )
    return Mode(letters, dimensions)


def _count(text: str, name: str) -> int:
    try:
        return whole(text)
    except ValueError as error:
        raise UsageError(f"{name}={quoted(text)}: {error}") from None


def _count_or_zero(text: str, name: str) -> int:
    return 0 if text == "0" else _count(text, name)


def _text(text: str, name: str) -> str:
    if not text:
        raise UsageError(f"{name}: the value is empty")
    return text


def _path(text: str, name: str) -> Path:
    return Path(_text(text, name))


def _words(text: str, name: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"{name}={text!r}: not words of a shell: {error}") from None


def _order(text: str, name: str) -> str:
    if text not in ORDERS:
        raise UsageError(f"{name}={text!r}: expected one of {', '.join(ORDERS)}")
    return text


def _export(text: str, name: str) -> tuple[Export, ...]:
    variable, equals, value = text.partition("=")
    if not _VARIABLE.fullmatch(variable):  # the value stays unsaid
        raise UsageError(f"{name} {quoted(variable)}: no name of a variable; expected VAR or VAR=VALUE")
    return (Export(variable, value, secret=True) if equals else Export(variable),)


def check_ddl_words(words: Sequence[str], name: str) -> None:
    """Raise UsageError, which names `name`, unless `words` are names and values, as DDL_OPTIONS has them."""
    for at in range(0, len(words), 2):
        if not words[at].startswith("-"):
            raise UsageError(
                f"{name}: {quoted(words[at])} is no option of libddl; expected names and values, such as "
                f"{name}='-dbg_level 1'"
            )
        if at + 1 == len(words):
            raise UsageError(f"{name}: {quoted(words[at])} has no value; expected one after it, such as -dbg_level 1")


def _about(
    names: str, read: Reader | None, metavar: str, text: str, *, group: str, add: bool = False
) -> dict[str, object]:
    """An option's row: its spellings without dashes (the first is the one that messages use), and how it is read.

    `read` None is a switch; `add` gathers the values of an option that is given several times.
    """
    return {"names": names.split(), "read": read, "metavar": metavar, "help": text, "group": group, "add": add}


WHERE, SHAPE, WHAT, SHOWN = "where it runs", "the ranks and their shape", "what they get", "what is shown and checked"


@dataclass(frozen=True)
class Options:
    """What ddlrun is asked to do. A field that is None or empty is chosen by ddlrun, which can say why (--verbose)."""

    hosts: str | None = field(
        default=None,
        metadata=_about(
            "H host hosts", _text, "HOST[:SLOTS],...", "these hosts (default: the batch system's, else this one)",
            group=WHERE,
        ),
    )  # fmt: skip
    hostfile: Path | None = field(
        default=None,
        metadata=_about(
            "hostfile machinefile", _path, "FILE", "the hosts in FILE, one a line: HOST, HOST:SLOTS or HOST slots=N",
            group=WHERE,
        ),
    )  # fmt: skip
    tcp: bool = field(
        default=False,
        metadata=_about("tcp", None, "", "TCP between hosts, even if there is a faster fabric", group=WHERE),
    )
    mpirun: Path | None = field(
        default=None,
        metadata=_about("mpirun", _path, "FILE", "this mpirun (default: beside python, else on PATH)", group=WHERE),
    )
    ranks: int | None = field(
        default=None,
        metadata=_about(
            "np n", _count, "N", "so many ranks (default: one a GPU; without GPUs the slots, else one a socket)",
            group=SHAPE,
        ),
    )  # fmt: skip
    accelerators: int | None = field(
        default=None,
        metadata=_about("accelerators", _count, "N", "so many ranks on each host (default: its GPUs)", group=SHAPE),
    )
    nodes: int | None = field(
        default=None,
        metadata=_about("nodes", _count, "N", "hosts in a rack (default: hosts / racks / aisles)", group=SHAPE),
    )
    racks: int | None = field(
        default=None, metadata=_about("racks", _count, "N", "racks in an aisle (default: 1)", group=SHAPE)
    )
    aisles: int | None = field(default=None, metadata=_about("aisles", _count, "N", "aisles (default: 1)", group=SHAPE))
    order: str = field(
        default="ranks",
        metadata=_about(
            "order", _order, "ranks|hosts",
            "ranks: consecutive ranks share a host (default); hosts: they go round the hosts, as in the original",
            group=SHAPE,
        ),
    )  # fmt: skip
    rankfile: Path | None = field(
        default=None,
        metadata=_about("rf rankfile", _path, "FILE", "place the ranks as FILE says: rank N=HOST slot=S", group=SHAPE),
    )
    mode: Mode = field(
        default=MEASURED,
        metadata=_about(
            "m mode", parse_mode, "MODE[:AxBxC]", "how DDL reduces: b, n, r, m or p; one for all dimensions or one "
            "for each (default p: measured)", group=WHAT,
        ),
    )  # fmt: skip
    ddlargs: tuple[str, ...] = field(
        default=(),
        metadata=_about("ddlarg ddloption ddlargs", _words, '"..."', "more for DDL_OPTIONS", group=WHAT, add=True),
    )
    no_ddloptions: bool = field(
        default=False, metadata=_about("no_ddloptions", None, "", "leave DDL_OPTIONS alone", group=WHAT)
    )
    mpiargs: tuple[str, ...] = field(
        default=(), metadata=_about("mpiarg mpiargs", _words, '"..."', "more for mpirun", group=WHAT, add=True)
    )
    exports: tuple[Export, ...] = field(
        default=(),
        metadata=_about(
            "x", _export, "VAR[=VALUE]", "give the ranks this variable (PATH, LD_LIBRARY_PATH, PYTHONPATH, "
            "CUDA_VISIBLE_DEVICES, DDL_* and NCCL_* go without asking)", group=WHAT, add=True,
        ),
    )  # fmt: skip
    restarts: int = field(
        default=0,
        metadata=_about("restarts", _count_or_zero, "N", "start a job that failed again, N times", group=WHAT),
    )
    start_timeout: int = field(
        default=START_SECONDS,
        metadata=_about(
            "start-timeout", _count, "SECONDS", "for the next host or rank to begin, before the start is given up "
            f"(default {START_SECONDS})", group=WHAT,
        ),
    )  # fmt: skip
    skipchecks: bool = field(
        default=False, metadata=_about("skipchecks", None, "", "look at no other host first", group=SHOWN)
    )
    verbose: bool = field(
        default=False,
        metadata=_about("v verbose", None, "", "say each choice with its reason, and the command", group=SHOWN),
    )
    dry_run: bool = field(
        default=False, metadata=_about("dry-run", None, "", "print what would be run, and run nothing", group=SHOWN)
    )
    rank_prefix: bool = field(
        default=False, metadata=_about("rank-prefix", None, "", "the rank before each line of output", group=SHOWN)
    )
    log_dir: Path | None = field(
        default=None,
        metadata=_about("log-dir", _path, "DIR", "keep the run's folder in DIR (default: see the manual)", group=SHOWN),
    )
    command: str = "run"  # run, or one of COMMANDS
    program: tuple[str, ...] = ()
    help: bool = False
    version: bool = False


def parse(argv: Sequence[str]) -> Options:
    """The options of a command line, without the `ddlrun` before it. Raises UsageError."""
    table = _table()
    values: dict[str, object] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "--" or not word.startswith("-") or word == "-":
            rest = words if word == "--" else [word, *words]
            if "command" not in values and word in COMMANDS:
                values["command"] = word
                continue
            values["program"] = tuple(rest)
            break
        name, equals, value = word.lstrip("-").partition("=")
        if name in ("h", "help"):
            return Options(help=True)
        if name == "version":
            return Options(version=True)
        if name not in table:
            raise UsageError(f"{word.partition('=')[0]}: {_unknown(name, table)}")
        key, row = table[name]
        spelled = word.partition("=")[0]
        read = row["read"]
        if read is None:
            if equals:
                raise UsageError(f"{word}: {spelled} takes no value")
            values[key] = True
            continue
        if not equals:
            if not words:
                raise UsageError(f"{spelled}: expected a value after it: {spelled} {row['metavar']}")
            value = words.pop(0)
        result = read(value, spelled)  # type: ignore[operator]  # a Reader, by _about
        values[key] = (*values.get(key, ()), *result) if row["add"] else result  # type: ignore[misc]
    options = Options(**values)  # type: ignore[arg-type]  # each reader returns its field's type
    _check(options)
    return options


def _check(options: Options) -> None:
    if options.hosts is not None and options.hostfile is not None:
        raise UsageError("-H and -hostfile: both name the hosts; give one of them")
    check_ddl_words(options.ddlargs, "--ddlarg")
    if options.command == "run" and not options.program:
        raise UsageError("PROGRAM: none given; expected a program to run, as in `ddlrun python train.py`")
    if options.command == "doctor" and options.program:
        raise UsageError(f"ddlrun doctor runs no program, and was given {shlex.join(options.program)!r}")


def _table() -> dict[str, tuple[str, dict[str, object]]]:
    """Every spelling of every option: the field that it sets, and its row."""
    return {
        name: (option.name, dict(option.metadata))
        for option in fields(Options)
        if option.metadata
        for name in option.metadata["names"]
    }


def _unknown(name: str, table: dict[str, tuple[str, dict[str, object]]]) -> str:
    near = get_close_matches(name, table, n=1)
    meant = f"did you mean {_dashed(near[0])}? " if near else ""
    return f"unknown option; {meant}`ddlrun --help` lists them. (A program comes after the options, or after --.)"


def _dashed(name: str) -> str:
    return f"-{name}" if len(name) <= 2 or name == "hostfile" else f"--{name}"


_HEAD = """\
usage: ddlrun [OPTIONS] PROGRAM [ARGS...]
       ddlrun doctor [OPTIONS]
       ddlrun bench | plan ...

Run PROGRAM on every GPU (or socket) of the hosts, as ranks of one job. The ranks find RANK, LOCAL_RANK, WORLD_SIZE,
LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in their environment, as under torchrun, and DDL_OPTIONS for libddl.
A PROGRAM that is a Python file and not executable is run with this python.
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


def usage() -> str:
    """What `ddlrun --help` prints."""
    parts = [_HEAD]
    width = 24
    for group in (WHERE, SHAPE, WHAT, SHOWN):
        parts.append(f"{group}:")
        for option in fields(Options):
            if option.metadata.get("group") == group:
                names = ", ".join(map(_dashed, option.metadata["names"][:2]))
                left = f"  {names} {option.metadata['metavar']}".rstrip()
                lines = _wrapped(option.metadata["help"], 118 - width)
                if len(left) >= width:
                    parts.append(left)
                    left = ""
                parts.append(f"{left:<{width}}  {lines[0]}")
                parts += [f"{'':{width}}  {line}" for line in lines[1:]]
        parts.append("")
    return "\n".join([*parts, _TAIL])


def _wrapped(text: str, width: int) -> list[str]:
    from textwrap import wrap

    return wrap(text, width)
