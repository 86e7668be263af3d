"""The command `lms`: run a script under a limit, ask what a limit costs, look at a recorded step."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lms
from lms.console import open_closed_streams, say, warn
from lms.errors import LMSError, UsageError, remedy
from lms.files import check_output, tell, write_output
from lms.launcher import launcher_of
from lms.link import KNOWN, Link, parse_link
from lms.link import cli as link_cli
from lms.options import BOUNDS, Options, add_flags, arguments, from_flags, given_words, spelled
from lms.plan_text import bound_text, forecast_text, records_text
from lms.sweep import cli as sweep_cli
from lms.target import Target, framework_of, parse_target
from lms.trace import Trace
from lms.tune import cli as tune_cli
from lms.units import format_size

if TYPE_CHECKING:
    from lms.core.plan import Plan

PLANNED = (*BOUNDS, "prefetch", "write_ahead")  # the options that concern the plan alone
INTERRUPTED = 130  # what shells return for a command that Ctrl-C ended
_EFFORT = 60.0  # seconds for the solver of --bound


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


class _Parser(argparse.ArgumentParser):
    """A command's parser. It refuses what it does not know itself, so that the command's own usage is shown."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unknown: {shlex.join(unknown)}; `{self.prog} --help` lists what there is")
        return found, unknown

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is sys.stdout:
            print(message, end="")  # argparse would ignore a full disk
        else:
            super()._print_message(message, file)


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _Parser(
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
    _add_simulate(commands)
    _add_report(commands)
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


def _add_run(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = link_cli.command(
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


def _add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = link_cli.command(
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


def _add_simulate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = link_cli.command(
        commands,
        "simulate",
        "predict a recorded step under another limit or on another link",
        "Plan the step that TRACE recorded and predict its peak and time; nothing is run.\n"
        "Without a limit, frac or budget: a table of limits.",
        "examples:\n"
        "  lms simulate step.json\n"
        "  lms simulate step.json --limit 8GB --records\n"
        "  lms simulate step.json --limit 8GB --bound\n"
        "  lms simulate step.json --budget 0 --link nvlink-c2c\n"
        "  lms simulate step.json --limit 8GB --perfetto pass.json      opens in ui.perfetto.dev\n",
    )
    parser.add_argument("trace", metavar="TRACE", type=Path, help="what `lms run --trace` or `lms plan --trace` wrote")
    _add_bounds(parser)
    parser.add_argument(
        "--records",
        action="store_true",
        help="list every record with its decision and the reason, under --limit, --frac or --budget",
    )
    parser.add_argument(
        "--bound",
        action="store_true",
        help="also print a lower bound on the time of any plan, and how far this plan is above it. The solver stops "
        f"after {_EFFORT:.0f} s",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the table of limits as JSON (bytes, seconds)")
    parser.add_argument(
        "--perfetto", metavar="FILE.json", type=Path, help="write the predicted pass, for ui.perfetto.dev"
    )
    parser.set_defaults(action=_simulate)


def _add_report(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = link_cli.command(
        commands,
        "report",
        "make a page with the picture of a recorded step",
        "Write one HTML page about the step that TRACE recorded: memory over time, what each limit costs, the modules\n"
        "and records that fill memory. With a limit, frac or budget: also the plan under it.",
        "examples:\n  lms report step.json\n  lms report step.json --limit 8GB -o step.html --picture memory.png\n",
    )
    parser.add_argument("trace", metavar="TRACE", type=Path, help="what `lms run --trace` or `lms plan --trace` wrote")
    parser.add_argument("-o", "--output", metavar="FILE.html", type=Path, help="the page (default: TRACE with .html)")
    parser.add_argument("--picture", metavar="FILE.png", type=Path, help="write the picture alone as well")
    _add_bounds(parser)
    parser.set_defaults(action=_report)


def _add_bounds(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, names=PLANNED)
    parser.add_argument(
        "--link",
        metavar="NAME|OUT/BACK",
        help="the link to assume instead of the one that was measured with the trace: GB a second out and back, such "
        f"as 6/2.1, or one of {', '.join(KNOWN)}",
    )


_NO_LINK = "--link: not given, and {} holds no measured link; name one, such as 6/2.1 (GB a second out and back)"


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
        _check_installed("--report", "matplotlib", "jinja2", extra="report")
    if options.metrics_port is not None:
        _check_installed("--metrics-port", "prometheus_client", extra="metrics")
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
    return _answer(trace, link, table, ("--trace", step, lambda: trace.to_json().encode()))


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


def _simulate(args: argparse.Namespace) -> int:
    options = from_flags(args)
    check_output("--json", args.json)
    check_output("--perfetto", args.perfetto)
    trace = Trace.load(args.trace)
    link = _link(args, trace)
    if link is None:
        raise UsageError(_NO_LINK.format(args.trace))
    if args.bound:
        _check_installed("--bound", "scipy", extra="bound")
    if not options.bounded:
        if args.bound:
            raise UsageError("--bound: a bound is that of one limit; expected --limit, --frac or --budget")
        if args.records:
            raise UsageError("--records: decisions are those of one limit; expected --limit, --frac or --budget")
        if args.perfetto is not None:
            raise UsageError(
                f"--perfetto={str(args.perfetto)!r}: without a plan there is nothing to draw; "
                "expected --limit, --frac or --budget"
            )
        return _answer(trace, link, args.json)
    if args.json is not None:
        warn("--json: without effect together with a limit, frac or budget")
    plan = _planned(trace, link, options)
    bound = [bound_text(trace, plan, link, effort=_EFFORT)] if args.bound else []  # first, because it may be refused
    records = [records_text(trace, plan)] if args.records else []
    text = "\n".join([forecast_text(trace, plan, link), *bound, *records])

    def perfetto() -> bytes:
        from lms.core.timeline import Timeline
        from lms.perfetto import to_json

        forecast = Timeline(plan.forecast.spans, plan.forecast.held)
        return to_json(trace, forecast, plan, measured=False).encode()

    return tell(text, ("--perfetto", args.perfetto, perfetto))


def _report(args: argparse.Namespace) -> int:
    options = from_flags(args)
    _check_installed("lms report", "matplotlib", "jinja2", extra="report")
    trace = Trace.load(args.trace)
    output = args.output if args.output is not None else args.trace.with_suffix(".html")
    check_output("--output", output)
    check_output("--picture", args.picture)
    from lms.picture import to_png
    from lms.report import picture_of, render

    link = _link(args, trace)
    if link is None and options.bounded:
        raise UsageError(_NO_LINK.format(args.trace))
    plan = _planned(trace, link, options) if link is not None and options.bounded else None
    page = render(trace, link=link, plan=plan, title=trace.machine.get("script") or args.trace.stem)
    output = write_output("--output", output, page.encode())
    if args.picture is not None:
        write_output("--picture", args.picture, to_png(picture_of(trace, plan)))
    print(output)
    return 0


def _tune(args: argparse.Namespace) -> int:
    _check_installed("lms tune", "optuna", extra="tune")
    options, target = _prepared(args)
    return tune_cli.run(args, options, target)


def _sweep(args: argparse.Namespace) -> int:
    _check_installed("lms sweep", "matplotlib", "jinja2", extra="report")
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
    _check_installed("lms run", framework, extra=framework)
    return options, target


def _output(option: str, path: Path | None) -> Path | None:
    """Where to write when the script has run, whatever folder it is in by then. Raises as `check_output`."""
    check_output(option, path)
    return None if path is None else path.absolute()


def _check_installed(what: str, *modules: str, extra: str) -> None:
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        needed = " and ".join(missing)
        raise UsageError(
            f"{what} needs {needed}, which is not installed: pip install './lms[{extra}]' in a copy of the repository"
        )


def _link(args: argparse.Namespace, trace: Trace) -> Link | None:
    if args.link is not None:
        return parse_link(args.link)
    return Link.from_dict(trace.link) if trace.link else None


def _planned(trace: Trace, link: Link, options: Options) -> Plan:
    from lms.core.plan import make_plan

    if options.frac is not None and not trace.capacity:
        raise UsageError("--frac: the trace does not say what the device holds; give --limit or --budget")
    limit = options.limit_of(trace.capacity)
    if limit is not None and not trace.measured:
        raise UsageError(
            "--limit bounds all of the device's memory, and this trace measured only the saved bytes "
            f"({format_size(trace.saved)}); give --budget"
        )
    return make_plan(
        trace, link, limit=limit, budget=options.budget, prefetch=options.prefetch, write_ahead=options.write_ahead
    )


def _answer(trace: Trace, link: Link, path: Path | None, *files: tuple[str, Path | None, Callable[[], bytes]]) -> int:
    """Print the limits and their costs, and write them as JSON to `path`, and other `files`; the exit status."""
    from lms.limits import limit_document, limits_of, limits_text

    rows = limits_of(trace, link)

    def document() -> bytes:
        return json.dumps(limit_document(trace, link, rows), indent=2).encode() + b"\n"

    return tell(limits_text(trace, link, rows), ("--json", path, document), *files)
