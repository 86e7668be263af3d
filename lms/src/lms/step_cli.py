"""The commands on a recorded step: `lms simulate` and `lms report`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lms.command import check_installed, command
from lms.console import warn
from lms.errors import UsageError
from lms.files import check_output, tell, write_output
from lms.link import KNOWN, Link, parse_link
from lms.options import BOUNDS, Options, add_flags, from_flags
from lms.plan_text import bound_text, forecast_text, records_text
from lms.trace import Trace
from lms.units import format_size

if TYPE_CHECKING:
    from lms.command import Commands
    from lms.core.plan import Plan

_PLANNED = (*BOUNDS, "prefetch", "write_ahead")  # the options that concern the plan alone
_EFFORT = 60.0  # seconds for the solver of --bound


def add(commands: Commands) -> None:
    """Add the commands to the parser's."""
    _add_simulate(commands)
    _add_report(commands)


def _add_simulate(commands: Commands) -> None:
    parser = command(
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


def _add_report(commands: Commands) -> None:
    parser = command(
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
    add_flags(parser, names=_PLANNED)
    parser.add_argument(
        "--link",
        metavar="NAME|OUT/BACK",
        help="the link to assume instead of the one that was measured with the trace: GB a second out and back, such "
        f"as 6/2.1, or one of {', '.join(KNOWN)}",
    )


_NO_LINK = "--link: not given, and {} holds no measured link; name one, such as 6/2.1 (GB a second out and back)"


def _simulate(args: argparse.Namespace) -> int:
    options = from_flags(args)
    check_output("--json", args.json)
    check_output("--perfetto", args.perfetto)
    trace = Trace.load(args.trace)
    link = _link(args, trace)
    if link is None:
        raise UsageError(_NO_LINK.format(args.trace))
    if args.bound:
        check_installed("--bound", "scipy", extra="bound")
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
        return answer(trace, link, args.json)
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
    check_installed("lms report", "matplotlib", "jinja2", extra="report")
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


def answer(trace: Trace, link: Link, path: Path | None, *files: tuple[str, Path | None, Callable[[], bytes]]) -> int:
    """Print the limits and their costs, and write them as JSON to `path`, and other `files`; the exit status."""
    from lms.limits import limit_document, limits_of, limits_text

    rows = limits_of(trace, link)

    def document() -> bytes:
        return json.dumps(limit_document(trace, link, rows), indent=2).encode() + b"\n"

    return tell(limits_text(trace, link, rows), ("--json", path, document), *files)
