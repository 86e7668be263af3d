"""The metric in a script's log: which lines have it, their steps, and a log file that grows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from lms.errors import UsageError

Pattern = re.Pattern[str]

_NUMBER = r"[-+]?(?:nan\b|inf(?:inity)?\b|(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
_STEPS = [
    re.compile(rf"(?<![\w.]){noun}[\"']?[\s:=#/]*(\d+)", re.IGNORECASE)
    for noun in (r"(?:global_)?step", "iter", "epoch")
]
_END = re.compile(rb"[\r\n]")  # a progress bar returns the carriage
OBJECTIVE = re.compile(r"^lms tune: value (\S+)$")  # what the process of an objective prints
NOTHING = re.compile(r"(?!)")  # for a log that is not searched
_MOST = 1 << 20  # bytes of a line without an end that are kept


@dataclass(frozen=True)
class Reading:
    """A value of the metric, and its step: steps rise."""

    step: int
    value: float


def named(name: str) -> Pattern:
    """What finds the metric `name` in `name: 0.1`, `name=0.1`, `name 0.1` and in JSON, and not in `other_name: 0.1`."""
    return re.compile(rf"(?<![\w./-]){re.escape(name)}[\"']?[\s:=]+({_NUMBER})", re.IGNORECASE)


def expression(text: str) -> Pattern:
    """The pattern that `--metric-regex` gives. Raises UsageError unless it has one group."""
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise UsageError(f"--metric-regex={text!r}: {error}; expected a regular expression of Python") from None
    if pattern.groups != 1:
        raise UsageError(
            f"--metric-regex={text!r}: {pattern.groups} groups; expected one, around the number, as in 'loss is (\\S+)'"
        )
    return pattern


def reading(line: str, pattern: Pattern, before: int) -> Reading | None:
    """The value in `line`, if it has one.

    Its step is the line's own (`step 7`, `epoch: 7`) if that is above `before`, the last one's, and else the next.
    """
    match = pattern.search(line)
    if match is None:
        return None
    try:
        value = float(match[1])
    except ValueError:
        return None
    steps = [int(found[1]) for step in _STEPS if (found := step.search(line))]
    return Reading(steps[0] if steps and steps[0] > before else before + 1, value)


class Log:
    """A file that a process writes: its new values of the metric, and its last lines."""

    def __init__(self, path: Path, pattern: Pattern = NOTHING) -> None:
        self.path, self._pattern = path, pattern
        self._at, self._part = 0, b""
        self.last: Reading | None = None

    def read(self, *, ended: bool = False) -> list[Reading]:
        """The values in the lines that are complete and new; in the last line too if the process has ended."""
        with self.path.open("rb") as file:
            file.seek(self._at)
            new = file.read()
        self._at += len(new)
        *lines, self._part = _END.split(self._part + new)
        if ended:
            lines.append(self._part)
        self._part = self._part[-_MOST:]
        found = []
        for line in lines:
            before = self.last.step if self.last is not None else 0
            if (one := reading(line.decode(errors="replace"), self._pattern, before)) is not None:
                found.append(one)
                self.last = one
        return found

    def tail(self, lines: int = 12) -> str:
        """The last lines."""
        with self.path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 8192))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
