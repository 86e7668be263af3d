"""`lms plan --largest`: the largest value of a script's option that a limit holds, forecast, then proven by a run."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lms.console import show_progress
from lms.core.plan import floor, plain_peak
from lms.errors import LimitError, LMSError, UsageError
from lms.options import Options
from lms.stats import format_seconds
from lms.sweep.runs import Row, execute, why, with_figures
from lms.target import Target
from lms.trace import Trace
from lms.tune.metric import Log
from lms.tune.parameters import command_line
from lms.units import format_size, plural

ROOM = 0.02  # of the limit: what plans leave free until the first copies were measured
MOST_RUNS = 5  # that try to prove a value
_MOST_OVER = 1.01  # of the limit, that a run which proves a value may reach
_FAR = 2  # times the largest value that was recorded: before a forecast beyond that, half of it is recorded
_MOST_RECORDED = 6
_FORM = "NAME=LOW..HIGH, such as batch-size=1..512"


@dataclass(frozen=True)
class Range:
    """A script's option, and the whole numbers that it may have, both ends included."""

    name: str
    low: int
    high: int


@dataclass(frozen=True)
class Need:
    """What a step with this value of the option needs: the floor, and the peak with nothing swapped, in bytes."""

    value: int
    floor: int
    plain: int


def parse_range(text: str) -> Range:
    """The range that `--largest` names. Raises UsageError."""
    name, _, values = text.partition("=")
    low, dots, high = values.partition("..")
    name = name.strip("-")
    if not name or not dots or not low.isdecimal() or not high.isdecimal() or not 0 < int(low) < int(high):
        raise UsageError(f"--largest={text!r}: expected {_FORM}: whole numbers above 0, the lower one first")
    return Range(name, int(low), int(high))


def at(value: int, one: Need, other: Need) -> Need:
    """What `value` needs if both figures are linear in it. A figure that falls with the value counts as constant."""

    def line(here: int, there: int) -> int:
        return here + max(0, there - here) * (value - one.value) // (other.value - one.value)

    return Need(value, line(one.floor, other.floor), line(one.plain, other.plain))


def largest(one: Need, other: Need, limit: int, high: int) -> int:
    """The largest value, at most `high`, whose floor leaves `ROOM` of the limit free; less than `one`'s if none."""
    room, rise = limit - int(ROOM * limit) - one.floor, max(0, other.floor - one.floor)
    if not rise:
        return high if room >= 0 else one.value - 1
    return min(high, one.value + room * (other.value - one.value) // rise)


class Search:
    """The processes of one search, in the order in which they run."""

    def __init__(self, range: Range, options: Options, words: Sequence[str], target: Target, folder: Path) -> None:
        self.range, self.options, self.words, self.target, self.folder = range, options, words, target, folder
        self.needs: list[Need] = []  # that were recorded, by ascending value

    def command(self, value: int) -> list[str]:
        """The script with this value."""
        return command_line(self.target, {self.range.name: value})

    def record(self, value: int) -> None:
        """Record two steps with this value. Raises LMSError if they cannot be had."""
        file = self.folder / f"{value}.trace"
        words = ["plan", *self.words, "--trace", str(file), *self.command(value)]
        status, log = self._execute(f"recording {self.range.name}={value}", words)
        if status != 0:
            raise LMSError(f"--largest: {self.range.name}={value} could not be recorded: {why(status, log)}")
        trace = Trace.load(file)
        if not trace.measured:
            raise LMSError(f"--largest: the step with {self.range.name}={value} says nothing of the device's memory")
        limit = self.options.limit_of(trace.capacity)
        assert limit is not None
        self.limit = limit
        self.needs.append(Need(value, floor(trace)[0], plain_peak(trace)))

    def forecast(self) -> int:
        """The largest value by the two recorded that lie farthest apart."""
        return largest(self.needs[0], self.needs[-1], self.limit, self.range.high)

    def below(self, value: int) -> int:
        """The value to try after `value` has failed: a quarter less of the way from the largest recorded one."""
        known = max((need.value for need in self.needs if need.value < value), default=value)
        return value - max(1, (value - known) // 4)

    def prove(self, value: int) -> Row:
        """Run the script with this value under the limit, to its end."""
        stats = self.folder / f"{value}.json"
        words = ["run", *self.words, "--stats", str(stats), *self.command(value)]
        status, log = self._execute(f"proving {self.range.name}={value}", words)
        return with_figures(Row(f"{self.range.name}={value}", "lms"), status, log, stats)

    def _execute(self, name: str, words: Sequence[str]) -> tuple[int, Log]:
        command = [sys.executable, "-m", "lms", *words]
        try:
            return execute(command, self.folder / "log", lambda now: show_progress(f"{name}: {format_seconds(now)}"))
        finally:
            show_progress("")


def run(text: str, options: Options, words: Sequence[str], target: Target) -> int:
    """Find the value, and print what was recorded, forecast and measured; 0 if a run has proven it, else 3.

    `words` are the options as `lms run` is to have them. Raises LMSError.
    """
    wanted = parse_range(text)
    with tempfile.TemporaryDirectory(prefix="lms-largest-") as folder:
        search = Search(wanted, options, words, target, Path(folder))
        search.record(wanted.low)
        search.record(min(wanted.high, 2 * wanted.low))
        value = search.forecast()
        while (nearer := value // _FAR) > search.needs[-1].value and len(search.needs) < _MOST_RECORDED:
            try:
                search.record(nearer)
                value = search.forecast()
            except LMSError as error:  # more than linear: what failed is too much
                print(error, flush=True)
                value = search.below(nearer)
                break
        name, limit = wanted.name, format_size(search.limit)
        for need in search.needs:
            print(_line(name, need, "recorded"))
        if value < wanted.low:
            raise LimitError(
                f"--largest={text!r}: a limit of {limit} is too low for {name}={wanted.low}, which needs "
                f"{format_size(search.needs[0].floor / (1 - ROOM))}: its floor and {ROOM:.0%} to spare; raise it, or "
                "begin the range lower"
            )
        for _ in range(MOST_RUNS):
            print(_line(name, at(value, search.needs[0], search.needs[-1]), "forecast"), flush=True)
            row = search.prove(value)
            measured = "" if row.peak is None else f"peak {format_size(row.peak)} of {limit}, "
            # The exit status does not tell of the first step, in which a GPU may already be out of memory.
            within = row.peak is not None and row.peak <= _MOST_OVER * search.limit and not row.over
            if within and row.step is not None:
                took = f"{plural(row.steps, 'step')}, {format_seconds(row.step)} each"
                print(f"{row.name}: proven by a run: {measured}{took}")
                print(shlex.join(["lms", "run", *words, *search.command(value)]))
                return 0
            note = row.note or (
                "its peak is not known" if row.peak is None else "memory went over the limit in the first step"
            )
            print(f"{row.name}: failed: {measured}{note}", flush=True)
            value = search.below(value)
            if value < wanted.low:
                break
    print(f"{name}: no value was proven; the largest that was recorded is {search.needs[-1].value}")
    return LimitError.exit_status


def _line(name: str, need: Need, how: str) -> str:
    return f"{name}={need.value}: floor {format_size(need.floor)}, unswapped {format_size(need.plain)} ({how})"
