"""One worker of a search: asks the study for trials, has them done, tells it how they ended."""

from __future__ import annotations

import re
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from optuna.trial import FrozenTrial, Trial, TrialState

from lms.console import say
from lms.errors import LimitError, LMSError
from lms.stats import format_seconds
from lms.tune import table
from lms.tune.metric import Log
from lms.tune.parameters import Parameter
from lms.tune.study import OUTCOME, Study, counted
from lms.tune.trial import End, Process, meaning
from lms.units import plural

MOST_FAILURES = 5  # before any trial has printed the metric on this host; then the host is at fault
MOST_BELOW = 3  # trials below the floor before any has a value; then the search ends, as it does if all are
_PAUSE = 0.5  # seconds between looks at the logs
_MOST_REPORTS = 50  # of one look: a script that prints its metric all the time must not keep the database busy


@dataclass(frozen=True)
class Search:
    """What is searched, and how. `command` gives a trial's command and variables: (trial, whether it runs alone)."""

    trials: int
    at_once: int
    parameters: Sequence[Parameter]
    metric: str
    pattern: re.Pattern[str]
    pruned: str | None  # the line that an objective's process prints if it gave itself up; None: we ask the pruner
    logs: Path
    gently: bool
    command: Callable[[Trial, bool], tuple[list[str], dict[str, str]]]


@dataclass
class Running:
    """A trial that is being done."""

    trial: Trial
    process: Process
    alone: bool
    began: float


class Worker:
    """Does trials until the study has as many results as were asked for."""

    def __init__(self, study: Study, search: Search) -> None:
        self._study, self._search = study, search
        self._distributions = {one.name: one.distribution for one in search.parameters}
        self._running: list[Running] = []
        self._below: list[Trial] = []  # those that wait to be tried alone
        self._beaten = float("-inf")
        self._waiting = False
        self._failures = 0
        self._able = False  # whether a trial has printed the metric on this host

    def run(self) -> None:
        """Work until the search is done. If it ends before, for whatever reason, its trials can be done again.

        Raises LMSError if the first trials show that none will have a value.
        """
        before = signal.signal(signal.SIGTERM, _terminated)
        try:
            while not self._finished():
                self._beat()
                self._start()
                self._wait()
                for one in list(self._running):
                    self._look(one)
        finally:
            signal.signal(signal.SIGTERM, before)
            self._give_back()

    def _finished(self) -> bool:
        if self._running or self._below:
            return False
        trials = self._study.trials()
        results = _results(trials)
        if results >= self._search.trials:
            return True
        running = sum(one.state == TrialState.RUNNING for one in trials)
        if not self._waiting and results + running >= self._search.trials:
            self._waiting = True
            say(f"waiting for {plural(running, 'trial')} of other workers, alive or dead")
        return False

    def _beat(self) -> None:
        if time.monotonic() - self._beaten < self._study.heartbeat:
            return
        self._study.beat([*(one.trial for one in self._running), *self._below])
        self._study.recover()
        self._beaten = time.monotonic()

    def _start(self) -> None:
        if self._below:
            if not self._running:
                self._launch(self._below.pop(0), alone=True)
            return
        while len(self._running) < self._search.at_once:
            trial = self._study.ask(self._search.trials, self._distributions)
            if trial is None:
                return
            self._launch(trial, alone=self._search.at_once == 1)

    def _launch(self, trial: Trial, *, alone: bool) -> None:
        command, environ = self._search.command(trial, alone)
        log = Log(self._search.logs / f"trial-{trial.number:04}.log", self._search.pattern)
        try:
            process = Process(command, log, environ, gently=self._search.gently)
        except OSError:  # the log cannot be written, or there are too many processes
            self._let_others_do(trial)
            raise
        self._running.append(Running(trial, process, alone, time.monotonic()))

    def _wait(self) -> None:
        poll = select.poll()
        for one in self._running:
            poll.register(one.process.descriptor, select.POLLIN)
        poll.poll(_PAUSE * 1000)

    def _look(self, one: Running) -> None:
        status = one.process.ended()
        log = one.process.log
        readings = log.read(ended=status is not None)
        self._able |= bool(readings)
        if self._search.pruned is None:
            for reading in readings[-_MOST_REPORTS:]:
                self._study.report(one.trial, reading.value, reading.step)
            if status is None and readings and one.trial.should_prune():
                one.process.stop()
                self._running.remove(one)
                self._told(one, self._study.tell(one.trial, TrialState.PRUNED), f"pruned at step {readings[-1].step}")
                return
        if status is None:
            return
        one.process.close()
        self._running.remove(one)
        pruned = self._search.pruned is not None and self._search.pruned in log.tail().splitlines()
        end, why = meaning(status, log.last, pruned=pruned)
        if end is End.RIGHT:
            assert log.last is not None
            told = self._study.tell(one.trial, TrialState.COMPLETE, log.last.value)
            self._told(one, told, f"{self._search.metric} {log.last.value:.6g}")
        elif end is End.PRUNED:
            self._told(one, self._study.tell(one.trial, TrialState.PRUNED), why)
        elif end is End.BELOW_FLOOR:
            self._below_floor(one, why)
        elif end is End.DIED:
            if self._study.tell(one.trial, TrialState.FAIL):
                self._study.again(one.trial, why)
            self._judge_host(one, why)
        else:
            self._failed(one, why)
            self._judge_host(one, why)

    def _below_floor(self, one: Running, why: str) -> None:
        if not one.alone:
            say(f"trial {one.trial.number}: {why} ({_error(one)}); it will be tried alone, with all the memory")
            self._below.append(one.trial)
            return
        # A pruned trial without a value: samplers learn from it to stay away. From a failed one they learn nothing.
        outcome = f"infeasible: {_error(one).partition('. ')[0]}"
        self._told(one, self._study.tell(one.trial, TrialState.PRUNED, outcome=outcome), f"{why} ({_error(one)})")
        trials = self._study.trials()
        below = sum(OUTCOME in trial.user_attrs and trial.state == TrialState.PRUNED for trial in trials)
        if below >= min(MOST_BELOW, self._search.trials) and not _proven(trials):
            raise LimitError(
                f"{plural(below, 'trial')} {'is' if below == 1 else 'are'} below LMS's floor, alone too, and no trial "
                f"has a value, so the search ends: {_error(one)}. Give more --memory or --limit, or a --param with "
                "smaller values"
            )

    def _failed(self, one: Running, why: str) -> None:
        # A script that printed the metric can be searched; these parameters are bad. The loss is NaN, memory is short.
        if one.process.log.last is not None or _proven(self._study.trials()):
            self._told(one, self._study.tell(one.trial, TrialState.FAIL, outcome=f"failed: {why}"), why)
            return
        if not self._study.tell(one.trial, TrialState.FAIL):  # one that does not count: script or options must change
            self._told(one, False, why)
            return
        print(one.process.log.tail(), file=sys.stderr)
        options = ", ".join(parameter.name for parameter in self._search.parameters)
        raise LMSError(
            f"trial {one.trial.number} failed ({why}), and no trial has printed the metric yet, so the search ends. "
            f"Above are the last lines of its log, {one.process.log.path}. Expected a script that takes the parameters "
            f"({options or 'those that the objective asks for'}), prints the metric ({self._search.metric}) and ends "
            "with exit status 0"
        )

    def _judge_host(self, one: Running, why: str) -> None:
        """Raise LMSError if trials fail here and none has come to the metric: a broken host could use up the study."""
        self._failures += 1
        if self._able or self._failures < MOST_FAILURES:
            return
        print(one.process.log.tail(), file=sys.stderr)
        raise LMSError(
            f"trials failed {self._failures} times on this host, {socket.gethostname()} (the last time: {why}), and "
            "none has printed the metric here, so this worker ends. Above are the last lines of "
            f"{one.process.log.path}. Look at what the script needs of its host: packages, data, memory, a GPU. "
            "Workers on other hosts, if there are any, go on. Then start this one again"
        )

    def _told(self, one: Running, told: bool, result: str) -> None:
        trials = self._study.trials()
        took = format_seconds(time.monotonic() - one.began)
        if not told:
            result += ", too late: it was taken for dead and will be done again"
        best = table.best(trials, self._study.direction)
        leader = f"best {best.value:.6g}, trial {best.number}; " if best is not None else ""
        done = f"{_results(trials)} of {self._search.trials} done"
        params = table.settings(trials[one.trial.number].params)  # an objective's process has chosen them
        say(f"trial {one.trial.number}: {result} after {took} ({params}); {leader}{done}")

    def _give_back(self) -> None:
        """End what runs; let others do it again."""
        for one in self._running:
            one.process.stop()
        self._study.storage.patient = False
        with suppress(LMSError):  # then they are taken for dead
            for trial in [*(one.trial for one in self._running), *self._below]:
                self._let_others_do(trial)
        self._study.storage.patient = True
        self._running, self._below = [], []

    def _let_others_do(self, trial: Trial) -> None:
        if self._study.tell(trial, TrialState.FAIL):
            self._study.again(trial)


def _results(trials: Sequence[FrozenTrial]) -> int:
    return sum(one.state.is_finished() for one in counted(trials))


def _proven(trials: Sequence[FrozenTrial]) -> bool:
    """Whether the script has shown that it can be searched."""
    return any(one.state == TrialState.COMPLETE for one in trials)


def _error(one: Running) -> str:
    """The last error that LMS wrote into the trial's log; the log's last line if there is none."""
    lines = one.process.log.tail(40).splitlines()
    errors = [line.partition("error: ")[2] for line in lines if "lms: " in line and "error: " in line]
    return (errors or lines or ["its log is empty"])[-1].strip()


def _terminated(*_: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)
