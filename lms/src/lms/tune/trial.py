"""One trial's process: how it is started and stopped, and what its end means."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import Enum

from lms.errors import LimitError
from lms.target import OVER_LIMIT
from lms.tune.metric import Log, Reading

_STOP_SECONDS = 10.0  # for a process to end after SIGTERM, before SIGKILL
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class End(Enum):
    """What the end of a trial's process means."""

    RIGHT = "it has a value"
    PRUNED = "the objective gave it up"
    BELOW_FLOOR = "its limit is below the floor"
    DIED = "something ended it: it may do better next time"
    FAILED = "it would fail again"


def meaning(status: int, last: Reading | None, *, pruned: bool = False) -> tuple[End, str]:
    """What it means that a process ended with `status` (negative: by a signal) and had `last` as its last value."""
    if status == LimitError.exit_status:
        return End.BELOW_FLOOR, "its limit is below LMS's floor"
    if status < 0 or status > 128:  # 128 + N: a shell's or ddlrun's word for signal N
        number = -status if status < 0 else status - 128
        known = number in [one.value for one in signal.Signals]
        return End.DIED, f"ended by {signal.Signals(number).name if known else f'signal {number}'}"
    if status not in (0, OVER_LIMIT):
        return End.FAILED, f"exit status {status}"
    if pruned:
        return End.PRUNED, "pruned"
    if last is None:
        return End.FAILED, "the metric is not in its log"
    if math.isnan(last.value):
        return End.FAILED, "the metric is not a number at its end"
    return End.RIGHT, ""


class Process:
    """A trial's command in a process group of its own, which ends with us, whatever ends us."""

    def __init__(self, command: Sequence[str], log: Log, environ: Mapping[str, str], *, gently: bool) -> None:
        """Start it; both its outputs go to the log's file. `gently`: it gets SIGTERM when we die, to end its ranks."""
        self.log = log
        log.path.parent.mkdir(parents=True, exist_ok=True)
        ours, word = os.getpid(), signal.SIGTERM if gently else signal.SIGKILL

        def follow_us() -> None:
            _libc.prctl(_PR_SET_PDEATHSIG, word)
            if os.getppid() != ours:
                os._exit(1)

        with log.path.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environ, "PYTHONUNBUFFERED": "1"},  # the metric is read while it is young
                start_new_session=True,
                preexec_fn=follow_us,  # this process has one thread
            )
        self.descriptor = os.pidfd_open(self._process.pid)

    def ended(self) -> int | None:
        """Its exit status, negative after a signal; None while it runs."""
        return self._process.poll()

    def stop(self) -> None:
        """End it and whatever it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_SECONDS)
        self.close()

    def close(self) -> None:
        """Free what is kept of it; end what its group still has, such as workers that load data."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self.descriptor)
