"""`lms tune`: its options. Optuna is imported only when the command runs."""

from __future__ import annotations

import argparse
import ast
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lms.command import command
from lms.console import say
from lms.errors import UsageError
from lms.options import BOUNDS, DEFAULT_FRAC, Options, add_flags, given_words, new_folder, spelled
from lms.target import Target
from lms.tune import metric
from lms.tune.parameters import FORMS, command_line, parse_all
from lms.units import format_size, parse_size

if TYPE_CHECKING:
    from optuna.trial import Trial

    from lms.command import Commands

STORAGE = "LMS_TUNE_STORAGE"


def add(commands: Commands) -> argparse.ArgumentParser:
    """Add `tune` to the command line of `lms`."""
    parser = command(
        commands,
        "tune",
        "search a script's parameters with Optuna, each trial under a limit",
        "Search for the parameters with which SCRIPT does best. Each trial is a fresh process, started by `lms run`.\n"
        "The script is not changed: it takes each --param as an option, and prints the metric to its log. Or SCRIPT\n"
        "defines `objective(trial)` as Optuna's examples do; then --param and --metric are not given.\n"
        "The same command on other hosts, with the same --storage, joins the search; started again, it goes on.",
        "examples:\n"
        "  lms tune --param lr=loguniform:1e-5:1e-1 --metric val_loss train.py big.toml\n"
        "  lms tune --param lr=loguniform:1e-5:1e-1 --metric-regex 'loss is (\\S+)' train.py model.lr={lr}\n"
        "  lms tune --trials 50 --at-once 2 --memory 80GB --storage postgresql+psycopg://user@host/base objective.py\n"
        "  optuna-dashboard sqlite:///train.db        the search as a page, while it runs and afterwards\n"
        "\n"
        "exit status: 0 some trial has a value, 1 none has or the first one failed, 2 wrong usage, 3 the trials are\n"
        "below LMS's floor, 130 after Ctrl-C, 143 after SIGTERM",
        takes_script=True,
    )
    parser.add_argument("--trials", metavar="N", default=20, type=_count, help="results that the study shall have (20)")
    parser.add_argument("--at-once", metavar="N", default=1, type=_count, help="trials that run beside one another (1)")
    parser.add_argument("--ranks", metavar="N", default=1, type=_count, help="make each trial a job of ddlrun (1)")
    parser.add_argument(
        "--memory", metavar="SIZE", help="device memory of all trials together: each has its part; or give --limit each"
    )
    parser.add_argument("--param", metavar="NAME=RANGE", default=[], action="append", help=f"search this; {FORMS}")
    parser.add_argument(
        "--metric",
        metavar="NAME",
        help="what the script prints as `NAME: 0.1`, `NAME=0.1` or JSON; the last one counts",
    )
    parser.add_argument("--metric-regex", metavar="REGEX", help="instead: its one group is the metric")
    parser.add_argument("--direction", choices=("minimize", "maximize"), default="minimize", help="(minimize)")
    parser.add_argument("--study", metavar="NAME", help="the search's name in the database (default: the script's)")
    parser.add_argument(
        "--storage", metavar="URL", help=f"the database (default: sqlite:///STUDY.db in this folder) [{STORAGE}]"
    )
    parser.add_argument("--logs", metavar="DIR", help="folder of the trials' logs (default: STUDY.logs)")
    parser.add_argument("--sampler", metavar="NAME", default="tpe", help="Optuna's, such as random or tpe:seed=1 (tpe)")
    parser.add_argument("--pruner", metavar="NAME", default="nop", help="Optuna's, such as median or hyperband (nop)")
    parser.add_argument(
        "--heartbeat",
        metavar="SECONDS",
        default=30,
        type=_count,
        help="a worker that is silent for four times as long is taken for dead (30)",
    )
    add_flags(parser.add_argument_group("options of lms run, for each trial"))
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number above 0")
    return int(text)


def run(args: argparse.Namespace, options: Options, target: Target) -> int:
    """Search; print what was found. Raises LMSError."""
    parameters = parse_all(args.param)
    pattern, label = _metric(args)
    objective = not parameters
    if objective:
        _check_objective(args, target)
    bounds = _bounds(args, options)
    passed = given_words(args, but=(*BOUNDS, "tensorboard"))
    name = args.study or Path(target.title).stem
    url = args.storage or os.environ.get(STORAGE) or f"sqlite:///{name}.db"
    logs = new_folder(args.logs or f"{name}.logs", "--logs")

    from lms.tune import objective as child  # here, because Optuna takes a second
    from lms.tune import table
    from lms.tune.study import Study
    from lms.tune.worker import Search, Worker

    study = Study(url, name, args.heartbeat, args.sampler, args.pruner)
    searched = {
        "parameters": {one.name: one.text for one in parameters},
        "metric": label,
        "arguments": list(target.args),
    }
    study.create(args.direction, searched)

    ranks = ["-np", str(args.ranks)] if args.ranks > 1 else []

    def trial_command(trial: Trial, alone: bool) -> tuple[list[str], dict[str, str]]:
        bound = [*(bounds[1] if alone else bounds[0]), *passed]
        if options.tensorboard is not None:  # each trial is a run of its own there
            bound += ["--tensorboard", str(options.tensorboard / f"trial-{trial.number:04}")]
        if objective:
            return [sys.executable, "-m", "lms.tune", *bound, target.name], child.environment(study, trial._trial_id)
        job = [str(Path(sys.executable).with_name("ddlrun")), *ranks] if ranks else []
        return [*job, sys.executable, "-m", "lms", "run", *bound, *command_line(target, trial.params)], {}

    each = f"{args.at_once} at once, each with {shlex.join(bounds[0])}"
    say(f"study {name}, {each}; logs in {logs}; page: optuna-dashboard {study.shown}")
    worker = Worker(
        study,
        Search(
            trials=args.trials,
            at_once=args.at_once,
            parameters=parameters,
            metric=label,
            pattern=pattern,
            pruned=child.PRUNED if objective else None,
            logs=logs,
            gently=bool(ranks),
            command=trial_command,
        ),
    )
    worker.run()
    trials = study.trials()
    print(table.text(trials, study.direction, label))
    best = table.best(trials, study.direction)
    if best is None:
        return 1
    if objective:
        print(f"\nbest: {table.settings(best.params)}")
    else:
        job = ["ddlrun", *ranks] if ranks else []
        words = command_line(target, best.params)
        print(f"\nbest: {shlex.join([*job, 'lms', 'run', *bounds[0], *passed, *words])}")
    return 0


def _metric(args: argparse.Namespace) -> tuple[metric.Pattern, str]:
    """What finds the metric in a log, and what people call it."""
    if not args.param:
        return metric.OBJECTIVE, "value"
    if bool(args.metric) == bool(args.metric_regex):
        raise UsageError("--metric, --metric-regex: expected one of them, to say what the script prints to be compared")
    if args.metric:
        return metric.named(args.metric), args.metric
    return metric.expression(args.metric_regex), args.metric_regex


def _check_objective(args: argparse.Namespace, target: Target) -> None:
    for option in ("metric", "metric_regex"):
        if getattr(args, option) is not None:
            raise UsageError(f"--{option.replace('_', '-')}: nothing to search; give --param, such as {FORMS}")
    try:
        body = [] if target.is_module else ast.parse(Path(target.name).read_bytes()).body
    except (OSError, SyntaxError, ValueError) as error:
        raise UsageError(f"SCRIPT={target.name!r}: {error}") from None
    if not any(isinstance(one, ast.FunctionDef) and one.name == "objective" for one in body):
        raise UsageError(
            f"SCRIPT={target.name!r}: nothing to search: no --param is given, and it defines no objective(trial). "
            f"Expected --param, such as {FORMS}"
        )
    if target.args:
        raise UsageError(f"{shlex.join(target.args)}: an objective file takes no arguments")
    if args.ranks > 1:
        raise UsageError("--ranks: an objective file is one process; give a script with --param")


def _bounds(args: argparse.Namespace, options: Options) -> tuple[list[str], list[str]]:
    """The limit of each trial as options of `lms run`, and that of one that runs alone."""
    if args.memory is not None:
        if given := [spelled(name, "--") for name in BOUNDS if getattr(args, name) is not None]:
            raise UsageError(f"--memory and {given[0]}: give one of them")
        whole = parse_size(args.memory, "--memory") // args.ranks
        if whole < args.at_once:
            raise UsageError(f"--memory={args.memory!r}: {format_size(whole)} for each rank; expected more")
        return ["--limit", str(whole // args.at_once)], ["--limit", str(whole)]
    if options.budget is not None:
        return ["--budget", str(options.budget)], ["--budget", str(options.budget)]
    if options.limit is not None:
        return ["--limit", str(options.limit)], ["--frac", str(DEFAULT_FRAC)]
    frac = options.frac or DEFAULT_FRAC
    if options.bounded:
        return ["--frac", str(frac)], ["--frac", str(min(1.0, frac * args.at_once))]
    return ["--frac", f"{frac / args.at_once:.4g}"], ["--frac", str(frac)]
