"""The runs of a sweep: their bounds, their processes one after another, and what each measured."""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from lms.errors import UsageError
from lms.stats import format_seconds
from lms.target import OVER_LIMIT
from lms.tune.metric import Log
from lms.tune.trial import Process, meaning
from lms.units import format_size, parse_size, plural

Kind = Literal["plain", "lms", "beside"]
_ERROR = "lms: error: "
_TICK = 500  # milliseconds between two looks at the clock
_SHOWN = 300  # characters of a log's last line
_TRIED = 1 << 16  # bytes: more than what a file's last block may have left


@dataclass(frozen=True)
class Bound:
    """One of `--limits`, as it was written: a share of the saved bytes (0 to 1), or a limit in bytes."""

    text: str
    share: float | None = None
    limit: int | None = None

    def words(self, saved: int) -> list[str]:
        """The bound as options of `lms run`, for a script that saves so many bytes in a pass."""
        if self.share is not None:
            return ["--budget", str(int(self.share * saved))]
        return ["--limit", str(self.limit)]

    def shown(self, saved: int) -> str:
        """The bound for a person."""
        if self.share is not None:
            return f"budget {format_size(int(self.share * saved))}"
        return f"limit {format_size(self.limit or 0)}"


def parse_bounds(text: str) -> tuple[Bound, ...]:
    """The bounds in `--limits`. Raises UsageError."""
    bounds: dict[str, Bound] = {}
    for word in (word.strip() for word in text.split(",")):
        if word.endswith("%"):
            try:
                share = float(word[:-1]) / 100
            except ValueError:
                share = -1.0
            if not 0 <= share <= 1:  # NaN fails this too
                raise UsageError(f"--limits={text!r}: {word!r}: expected a share of 0% to 100%, such as 35%")
            bound = Bound(word, share=share)
        else:
            bound = Bound(word, limit=parse_size(word, "--limits" if word == text else f"--limits={text!r}: one"))
        if word in bounds:
            raise UsageError(f"--limits={text!r}: {word!r} is given twice; expected each limit once")
        bounds[word] = bound
    return tuple(bounds.values())


@dataclass(frozen=True)
class Row:
    """One run. Sizes in bytes, times in seconds; None: not measured. `note` says why a run failed, or what is odd."""

    name: str
    kind: Kind
    bound: str = ""
    peak: int | None = None  # of the whole run
    step: float | None = None  # from optimizer step to optimizer step, median
    steps: int = 0
    moved: float | None = None  # bytes out in a step
    over: bool = False  # memory went over the limit after the first step
    note: str = ""


def with_figures(row: Row, status: int, log: Log, stats: Path) -> Row:
    """The row of a run that ended with `status` and left its figures in the file `stats`."""
    if status not in (0, OVER_LIMIT):
        return replace(row, note=why(status, log))
    try:
        found = json.loads(stats.read_text())
        steps, peak, step = int(found["steps"]), found["peak"], found["step_time"]
        out = found.get("swapped_out", 0) + found.get("state_out", 0)
    except (OSError, ValueError, KeyError):
        return replace(row, note="it left no figures")
    over = status == OVER_LIMIT
    note = "memory went over the limit" if over else ""
    if step is None:
        note = note or f"{plural(steps, 'step')} of PyTorch's optimizers seen; at least 2 are needed"
    moved = out / steps if steps and row.kind == "lms" else None
    return replace(row, peak=peak, step=step, steps=steps, moved=moved, over=over, note=note)


def why(status: int, log: Log) -> str:
    """Why a run failed: the error that LMS said, or else what its end means and the last line of its log.

    If nothing can be added to the log, that is said too: it may be why the run failed, and why the log is silent.
    """
    lines = [line.strip() for line in log.tail(40).splitlines() if line.strip()]
    errors = [line.removeprefix(_ERROR) for line in lines if line.startswith(_ERROR)]
    if errors:
        return errors[-1]
    memory = ", as when memory is full" if status < 0 else ""
    refused = _refusal(log.path)
    said = [
        *(line[:_SHOWN] for line in lines[-1:]),
        *([f"its log {str(log.path)!r} cannot be written: {refused}"] if refused else []),
    ]
    return f"{meaning(status, None)[1]}{memory}: {'; '.join(said) or 'it said nothing'}"


def _refusal(path: Path) -> str | None:
    """Why the file system takes no more bytes into this file; None if it takes them. The file stays as it is."""
    try:
        with path.open("ab", buffering=0) as file:
            size, left = file.tell(), _TRIED
            try:
                while left > 0:
                    left -= file.write(bytes(left))
                os.fsync(file.fileno())  # some file systems tell only then
            finally:
                file.truncate(size)
    except OSError as error:
        return error.strerror
    return None


def execute(command: Sequence[str], log: Path, tick: Callable[[float], None]) -> tuple[int, Log]:
    """Run `command` in a process of its own to its end; the exit status and its log. It ends if we are interrupted.

    `tick` is called about twice a second, with the seconds so far.
    """
    began = time.monotonic()
    process = Process(command, Log(log), {}, gently=False)
    try:
        poll = select.poll()
        poll.register(process.descriptor, select.POLLIN)
        while (status := process.ended()) is None:
            tick(time.monotonic() - began)
            poll.poll(_TICK)
    except BaseException:
        process.stop()
        raise
    process.close()
    return status, process.log


class Progress:
    """How far a sweep is, in one line of text."""

    WIDTH = 24

    def __init__(self, total: int) -> None:
        self.total = total
        self.done: list[float] = []  # seconds of each run that is over

    def text(self, name: str, seconds: float) -> str:
        """The line while run `name` has run for so many seconds."""
        usual = sum(self.done) / len(self.done) if self.done else None
        part = min(0.95, seconds / usual) if usual else 0.0
        filled = int(self.WIDTH * (len(self.done) + part) / self.total)
        left = ""
        if usual:
            rest = max(0.0, usual - seconds) + usual * (self.total - len(self.done) - 1)
            left = f", about {format_seconds(rest)} left"
        bar = "#" * filled + "." * (self.WIDTH - filled)
        return f"[{bar}] {len(self.done) + 1}/{self.total} {name}: {format_seconds(seconds)}{left}"
