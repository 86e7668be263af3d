"""The command `lms`: its parser, and the commands that run a script."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import lms
from lms import step_cli
from lms.command import Parser, check_installed, command
from lms.console import open_closed_streams, say, warn
from lms.errors import LMSError, UsageError, remedy
from lms.files import check_output
from lms.launcher import launcher_of
from lms.link import cli as link_cli
from lms.options import Options, add_flags, arguments, from_flags, given_words, spelled
from lms.sweep import cli as sweep_cli
from lms.target import Target, framework_of, parse_target
from lms.tune import cli as tune_cli

if TYPE_CHECKING:
    from lms.command import Commands

INTERRUPTED = 130  # what shells return for a command that Ctrl-C ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (sys.argv's when None); return its exit status. A script's SystemExit passes."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    open_closed_streams()
    try:
        own, target = _split(arguments)
        try:
            parser = _parser()
            if own and own[0].startswith("-") and own[0] not in ("-h", "--help", "--version"):
                parser.error(f"unknown: {own[0]}; expected a COMMAND first")
            args = parser.parse_args(own)
        finally:
            sys.stdout.flush()  # of --help and --version, which end the process
        args.target = target
        status: int = args.action(args)
        sys.stdout.flush()
        return status
    except LMSError as error:
        say(f"error: {error}")
        return error.exit_status
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _give_stdout_up()  # its reader (a pager, head) has enough
        return 0
    except OSError as error:  # of our own: a script's is shown as Python shows it
        if error.filename is None and _stdout_refuses():
            _give_stdout_up()
            say(f"error: stdout: not written: {error.strerror}; send the output elsewhere")
            return LMSError.exit_status
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        say(f"error: {what}; {remedy(error, 'lms cannot go on without it')}")
        return LMSError.exit_status


def _stdout_refuses() -> bool:
    try:
        print(flush=True)  # a flush alone would do nothing if stdout is not buffered
    except OSError:
        return True
    except ValueError:  # a script has closed it
        return False
    return False


def _give_stdout_up() -> None:
    # Python would complain again when it flushes at its end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = Parser(
        prog="lms",
        description="Large model support: train models whose tensors need more memory than the device has.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"lms {lms.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, title="commands")
    _add_run(commands)
    _add_plan(commands)
    step_cli.add(commands)
    link_cli.add(commands)
    sweep_cli.add(commands).set_defaults(action=_sweep)
    tune_cli.add(commands).set_defaults(action=_tune)
    return parser


_EXAMPLES = """\
examples:
  lms plan train.py big.toml               what limit does my script need, and what would it cost?
  lms run --limit 12GB train.py big.toml   train within 12 GB; the script is not changed
  lms run --limit 12GB --trace step.json train.py
  lms simulate step.json --limit 8GB       the same step under another limit, without running it
  lms simulate step.json --link pcie4x16   ... or on another machine's link
  lms report step.json -o step.html        a page with the picture of that step
  lms sweep train.py one_epoch.toml        memory against time: plain, and under several limits
  lms link measure                         what do this machine's links carry?
  lms tune --param lr=loguniform:1e-5:1e-1 --metric val_loss train.py    which learning rate is best?
"""


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Our own part of the command line, and the target's, from SCRIPT or -m on, with whatever looks like an option.

    argparse cannot be asked to stop there: it looks for its options behind every `--`.
    """
    if argv[:1] not in (["run"], ["plan"], ["sweep"], ["tune"]):
        return argv, []
    at = 1
    while at < len(argv) and argv[at].startswith("-") and not argv[at].startswith("-m"):
        at += 1 if argv[at] in _SWITCHES or "=" in argv[at] else 2
    return argv[:at], argv[at:]


_SWITCHES = ("-h", "--help", *(spelled(option.name, "--") for option in arguments() if option.type == "bool"))


def _add_run(commands: Commands) -> None:
    parser = command(
        commands,
        "run",
        "run a script with large model support",
        "Run SCRIPT as python would, with large model support switched on in the process.\n"
        "Tensors that are saved for the backward pass are swapped out once memory passes the limit.\n"
        "A script that imports Keras or TensorFlow and no PyTorch trains with swapping in each model.fit.\n"
        "Without --limit, --frac or --budget it takes --frac 0.9.\n"
        "LMS's own messages go to stderr; an option can also be set in the environment variable in [BRACKETS].",
        "examples:\n"
        "  lms run --limit 12GB train.py big.toml\n"
        "  lms run --frac 0.8 --spill-dir /scratch -m mypackage.train big.toml\n"
        "  lms run --budget 0 --trace step.json --report step.html train.py\n"
        "  lms run --limit 12GB --perfetto pass.json train.py      opens in ui.perfetto.dev\n"
        "\n"
        "exit status: the script's own; 1 after its exception, 2 wrong usage, 3 the limit is below the floor,\n"
        "4 the disk or host memory refused bytes, 5 bytes came back short or, with --verify, changed, 6 the script\n"
        "succeeded but memory went over the limit after the first step, 130 after Ctrl-C",
        takes_script=True,
    )
    add_flags(parser)
    parser.add_argument("--trace", metavar="FILE", type=Path, help="write the recorded step, for simulate and report")
    parser.add_argument("--report", metavar="FILE.html", type=Path, help="write a page with the picture of one step")
    parser.add_argument(
        "--perfetto", metavar="FILE.json", type=Path, help="write the last pass as it ran, for ui.perfetto.dev"
    )
    parser.add_argument("--stats", metavar="FILE.json", type=Path, help="write the session's figures (bytes, seconds)")
    parser.set_defaults(action=_run)


def _add_plan(commands: Commands) -> None:
    parser = command(
        commands,
        "plan",
        "run two steps of a script, then say what limit it needs and what each costs",
        "Run SCRIPT until its optimizer has stepped twice, stop it, and answer: the floor that no limit can go below\n"
        "and the module it belongs to, the peak with nothing swapped, how long a step takes and how much of it the\n"
        "device computes, and a table of limits with the peak, the bytes moved and the step time that each would\n"
        "have. Options are those of `lms run`: give a limit if the script does not fit (default: --frac 0.9).\n"
        "With --largest: the largest value of one of the script's own options that the limit holds. Steps with a few\n"
        "smaller values are recorded, the floor of others is forecast, and the script is run to its end to prove it.",
        "examples:\n"
        "  lms plan train.py big.toml\n"
        "  lms plan --limit 12GB train.py big.toml\n"
        "  lms plan --json limits.json train.py\n"
        "  lms plan --limit 12GB --largest batch-size=1..512 train.py few_steps.toml\n",
        takes_script=True,
    )
    add_flags(parser)
    parser.add_argument(
        "--largest",
        metavar="NAME=LOW..HIGH",
        help="find the largest whole number that the limit holds: it is given to the script as --NAME=VALUE, or in the "
        "place of {NAME} in an argument",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the same as JSON (bytes, seconds)")
    parser.add_argument("--trace", metavar="FILE", type=Path, help="write the recorded step, for simulate and report")
    parser.set_defaults(action=_plan)


def _run(args: argparse.Namespace) -> int:
    options, target = _prepared(args)
    trace, report = _output("--trace", args.trace), _output("--report", args.report)
    perfetto, stats = _output("--perfetto", args.perfetto), _output("--stats", args.stats)
    if framework_of(target) == "tensorflow":
        if perfetto is not None:
            raise UsageError(
                f"--perfetto={str(args.perfetto)!r}: copies in a TensorFlow graph are not timed; write the step with "
                "--trace, and the forecast of it with `lms simulate TRACE --limit SIZE --perfetto FILE`"
            )
        if stats is not None:
            raise UsageError(f"--stats={str(args.stats)!r}: a session of TensorFlow has none; its last line sums it up")
    if report is not None:
        check_installed("--report", "matplotlib", "jinja2", extra="report")
    if options.metrics_port is not None:
        check_installed("--metrics-port", "prometheus_client", extra="metrics")
    files = {"trace": trace, "report": report, "perfetto": perfetto, "stats": stats}
    return launcher_of(target).run(target, options, **{name: path for name, path in files.items() if path is not None})


def _plan(args: argparse.Namespace) -> int:
    options, target = _prepared(args)
    step, table = _output("--trace", args.trace), _output("--json", args.json)
    if args.largest is not None:
        return _largest(args, options, target)
    status, trace, link = launcher_of(target).record(target, options)
    if trace is None or link is None:
        return status
    return step_cli.answer(trace, link, table, ("--trace", step, lambda: trace.to_json().encode()))


def _largest(args: argparse.Namespace, options: Options, target: Target) -> int:
    from lms.sweep import largest

    if framework_of(target) == "tensorflow":
        raise UsageError(
            f"--largest={args.largest!r}: {target.name} trains with TensorFlow; expected a script of PyTorch's"
        )
    if options.budget is not None:
        raise UsageError(f"--largest={args.largest!r}: a budget does not bound the device; give --limit or --frac")
    for option in ("trace", "json"):
        if getattr(args, option) is not None:
            warn(f"--{option}: without effect together with --largest")
    return largest.run(args.largest, options, given_words(args), target)


def _tune(args: argparse.Namespace) -> int:
    check_installed("lms tune", "optuna", extra="tune")
    options, target = _prepared(args)
    return tune_cli.run(args, options, target)


def _sweep(args: argparse.Namespace) -> int:
    check_installed("lms sweep", "matplotlib", "jinja2", extra="report")
    _, target = _prepared(args)
    beside = []
    for text in args.beside:
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise UsageError(
                f"--beside={text!r}: {error}; expected a script and its arguments, as a shell has them"
            ) from None
        beside.append(parse_target(words, "sweep --beside"))
    return sweep_cli.run(args, target, beside)


def _prepared(args: argparse.Namespace) -> tuple[Options, Target]:
    """Everything about a command that runs a script that can be refused before a framework is loaded."""
    target = parse_target(args.target, args.action.__name__[1:])
    options = from_flags(args)
    framework = framework_of(target)
    check_installed("lms run", framework, extra=framework)
    return options, target


def _output(option: str, path: Path | None) -> Path | None:
    """Where to write when the script has run, whatever folder it is in by then. Raises as `check_output`."""
    check_output(option, path)
    return None if path is None else path.absolute()
