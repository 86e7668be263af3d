"""`lms sweep`: its options, and the order of its runs."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lms.command import command
from lms.console import say, show_progress
from lms.errors import UsageError
from lms.files import check_output, write_output
from lms.options import BOUNDS, add_flags, arguments, given_words
from lms.sweep.runs import Bound, Kind, Progress, Row, execute, parse_bounds, why, with_figures
from lms.target import Target, framework_of
from lms.units import plural

if TYPE_CHECKING:
    from lms.command import Commands
    from lms.tune.metric import Log

LIMITS = "75%,50%,35%,25%"
INTERRUPTED = 130
_PASSED = tuple(  # options of `lms run` that a sweep hands on
    one.name for one in arguments() if one.name not in (*BOUNDS, "tensorboard", "metrics_port", "metrics_address")
)


def add(commands: Commands) -> argparse.ArgumentParser:
    """Add `sweep` to the command line of `lms`."""
    parser = command(
        commands,
        "sweep",
        "run a script plain and under several limits: memory against time",
        "Run SCRIPT to its end several times, each in a fresh process: without LMS, and with `lms run` under each of\n"
        "--limits. Then print a table of peak memory and step time, and write it with a plot to a folder.\n"
        "A limit is a share of the bytes that a pass saves for its backward (75%: so much may stay on the device;\n"
        "`lms plan` measures the bytes first), or a size such as 12GB, as `lms run --limit` has it. A run that fails\n"
        "is a row that says why. Give the script few epochs, but ten steps or more: the first ones are slower. Ctrl-C\n"
        "ends the run under way and prints what there is.",
        "examples:\n"
        "  lms sweep train.py one_epoch.toml\n"
        "  lms sweep --limits 50%,25%,2GB --beside 'train.py big.toml --checkpoint' train.py big.toml\n"
        "\n"
        "exit status: 0 some run under a limit has figures, 1 none has, 2 wrong usage, 130 after Ctrl-C",
        takes_script=True,
    )
    shown = LIMITS.replace("%", "%%")  # argparse formats help
    parser.add_argument("--limits", metavar="LIST", default=LIMITS, help=f"shares or sizes, with commas ({shown})")
    parser.add_argument(
        "--beside",
        metavar="'SCRIPT ARGS'",
        default=[],
        action="append",
        help="run this, too, without LMS, such as the same script with its own gradient checkpointing; can be repeated",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        type=Path,
        help="folder of the page, the table as JSON and each run's log (default: SCRIPT.sweep)",
    )
    add_flags(parser.add_argument_group("options of lms run, for each run under a limit"), names=_PASSED)
    return parser


def run(args: argparse.Namespace, target: Target, beside: Sequence[Target]) -> int:
    """Do the runs, print the table and write the page. Raises LMSError."""
    bounds = parse_bounds(args.limits)
    for one in (target, *beside):
        if framework_of(one) == "tensorflow":
            raise UsageError(f"SCRIPT={one.name!r}: it trains with TensorFlow; expected a script of PyTorch's")
    folder = (args.output or Path(f"{Path(target.title).stem}.sweep")).absolute()
    check_output("--output", folder / "sweep.html")
    sweep = _Sweep(folder, given_words(args), target, bounds, beside)
    say(f"runs of {target.title}, one after another: {', '.join(sweep.names)}; their logs are in {folder}")
    interrupted = False
    try:
        sweep.do()
    except KeyboardInterrupt:
        interrupted = True
    finally:
        show_progress("")
    if interrupted:
        say(f"interrupted: {len(sweep.progress.done)} of {plural(len(sweep.names), 'run')} are over")
    if sweep.rows:
        _tell(sweep.rows, folder, target)
    if interrupted:
        return INTERRUPTED
    return 0 if any(row.kind == "lms" and row.peak is not None for row in sweep.rows) else 1


def _tell(rows: Sequence[Row], folder: Path, target: Target) -> None:
    from lms.sweep.page import render, text

    print(text(rows), flush=True)
    title = shlex.join([target.title, *target.args])
    page = render(rows, title=title, command=shlex.join(["lms", *sys.argv[1:]]))
    document = {"format": "lms-sweep-1", "script": title, "runs": [asdict(row) for row in rows]}
    write_output("--output", folder / "sweep.json", json.dumps(document, indent=2).encode() + b"\n")
    say(f"wrote {write_output('--output', folder / 'sweep.html', page.encode())}")


class _Sweep:
    """The runs in their order, and the rows of those that are over."""

    def __init__(
        self, folder: Path, passed: Sequence[str], target: Target, bounds: Sequence[Bound], beside: Sequence[Target]
    ) -> None:
        self.folder, self.passed, self.target, self.bounds, self.beside = folder, passed, target, bounds, beside
        self.rows: list[Row] = []
        self._needs_saved = any(bound.share is not None for bound in bounds)
        self._beside_names = [shlex.join([other.title, *other.args]) for other in beside]
        planned = [_PLANNING] if self._needs_saved else []
        self.names = [_FIRST, *planned, *(f"LMS {bound.text}" for bound in bounds), *self._beside_names]
        self.progress = Progress(len(self.names))

    def do(self) -> None:
        """All runs, one after another. Raises KeyboardInterrupt; the run under way is ended then."""
        self._plain(_FIRST, "plain", self.target, "plain")
        saved, unknown = self._saved() if self._needs_saved else (None, "")
        for bound in self.bounds:
            name = f"LMS {bound.text}"
            if bound.share is not None and saved is None:
                self.rows.append(Row(name, "lms", note=f"the saved bytes are not known: {unknown}"))
                continue
            stats = self._stats(bound.text)
            words = [*_LMS, "run", *bound.words(saved or 0), *self.passed, "--stats", str(stats), *self.target.words]
            self._add(Row(name, "lms", bound.shown(saved or 0)), words, stats)
        for number, (name, other) in enumerate(zip(self._beside_names, self.beside, strict=True), 1):
            self._plain(name, "beside", other, f"beside{number}")

    def _plain(self, name: str, kind: Kind, target: Target, file: str) -> None:
        stats = self._stats(file)
        self._add(Row(name, kind), [*_PLAIN, str(stats), *target.words], stats)

    def _add(self, row: Row, words: Sequence[str], stats: Path) -> None:
        status, log = self._execute(row.name, words, stats.with_suffix(".log"))
        row = with_figures(row, status, log, stats)
        self.rows.append(row)
        show_progress("")
        say(f"{row.name}: {row.note or 'done'}")

    def _execute(self, name: str, words: Sequence[str], file: Path) -> tuple[int, Log]:
        began = time.monotonic()
        status, log = execute(words, file, lambda seconds: show_progress(self.progress.text(name, seconds)))
        self.progress.done.append(time.monotonic() - began)
        return status, log

    def _stats(self, file: str) -> Path:
        """Where a run's figures go; those of an earlier sweep are removed."""
        path = self.folder / f"{file}.json"
        path.unlink(missing_ok=True)
        return path

    def _saved(self) -> tuple[int | None, str]:
        """The bytes that a pass saves, by `lms plan`; or why they are not known."""
        file = self._stats("plan")
        words = [*_LMS, "plan", *self.passed, "--json", str(file), *self.target.words]
        status, log = self._execute(_PLANNING, words, file.with_suffix(".log"))
        if status != 0 or not file.exists():
            return None, why(status, log)
        return int(json.loads(file.read_text())["saved"]), ""


_FIRST, _PLANNING = "plain", "lms plan"  # names of runs
_LMS = (sys.executable, "-m", "lms")
_PLAIN = (sys.executable, "-m", "lms.sweep.plain")
