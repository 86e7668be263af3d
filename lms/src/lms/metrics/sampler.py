"""The thread that samples, and who is watched."""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from lms.console import warn
from lms.errors import UsageError
from lms.metrics.events import EventFile
from lms.metrics.families import Figure, Sample, sample_of
from lms.metrics.page import Page
from lms.ranks import job_of, local_rank_of, rank_of

PERIOD = 1.0  # seconds between samples
LOOPBACK = "127.0.0.1"

Source = Callable[[], Mapping[str, Figure]]  # called on the sampler's thread; figures by the key of their family


@dataclass(frozen=True)
class Outputs:
    """Where samples go: a folder for TensorBoard, a port for Prometheus, or both."""

    tensorboard: Path | None = None
    port: int | None = None
    address: str = LOOPBACK

    def __bool__(self) -> bool:
        return self.tensorboard is not None or self.port is not None

    def check(self) -> None:
        """Raise UsageError if what they need is not installed."""
        if self.port is not None and find_spec("prometheus_client") is None:
            raise UsageError(
                f"a port for metrics, {self.port}, needs prometheus_client, which is not installed: "
                "pip install './lms[metrics]' in a copy of the repository"
            )


def watch(name: str, source: Source, outputs: Outputs, rank: int | None = None) -> Watch:
    """Sample `source`, whose families begin with `name`, once a second until the watch is closed.

    All sources of a process with the same outputs have one thread and one port. `rank` is this process's, if it is not
    what the launcher's variables tell; a later call may give another. What fails later is a warning: the training goes
    on.

    Raises UsageError as `Outputs.check`.
    """
    outputs.check()
    with _lock:
        sampler = _samplers.get(outputs)
        if sampler is None:
            sampler = _samplers[outputs] = _Sampler(outputs, rank)
        elif rank is not None:
            sampler.place(rank)
        return Watch(sampler, name, source)


class Watch:
    """A source that is sampled."""

    def __init__(self, sampler: _Sampler, name: str, source: Source) -> None:
        self._sampler, self._name = sampler, name
        sampler.add(name, source)

    def close(self) -> None:
        """Sample a last time, then no more. Idempotent. The port closes with the process's last watch."""
        with _lock:
            sampler = self._sampler
            if sampler.remove(self._name) and _samplers.get(sampler.outputs) is sampler:
                del _samplers[sampler.outputs]


class _Sampler:
    """One thread that samples all sources of this process for the same outputs."""

    def __init__(self, outputs: Outputs, rank: int | None) -> None:
        self.outputs = outputs
        self._rank = rank if rank is not None else rank_of(os.environ)
        self._speaks = not local_rank_of(os.environ)  # one rank of a host says what is the same for all of them
        self._sources: dict[str, Source] = {}
        self._sampling = threading.Lock()
        self._warned: set[str] = set()
        self._events: EventFile | None = None
        self._folder: Path | None = None
        self._page: Page | None = None
        self._open()
        self._samples = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bascule-metrics", daemon=True)

    def place(self, rank: int) -> None:
        """Go on as this rank, which the process may have become."""
        with self._sampling:
            if rank != self._rank:
                self._rank = rank
                self._close()
                self._open()

    def _open(self) -> None:
        self._folder = self.outputs.tensorboard
        if self._folder is not None and self._rank is not None:
            self._folder /= f"rank{self._rank}"
        if self.outputs.port is not None:
            job = job_of(os.environ) or (None if self._rank is None else "ranks")
            labels = (str(self._rank or 0), socket.gethostname())
            self._page = Page(self.outputs.port, self.outputs.address, labels, job)

    def _close(self) -> None:
        if self._events is not None:
            self._events.close()
        if self._page is not None:
            self._page.close()
        self._events = self._page = self._folder = None

    def add(self, name: str, source: Source) -> None:
        """Sample this one too."""
        self._sources[name] = source
        if not self._thread.ident:
            atexit.register(self._end)
            try:
                self._thread.start()
            except RuntimeError as error:  # too many threads
                self._warn("thread", f"{error}: no figures are written until the end; the training goes on")

    def remove(self, name: str) -> bool:
        """Sample a last time, then no longer this one; True if it was the last one and the sampler has ended."""
        if name not in self._sources:
            return False
        self._sample()
        del self._sources[name]
        if self._sources:
            return False
        self._end()
        return True

    def _run(self) -> None:
        while True:
            self._sample()
            if self._stop.wait(PERIOD):
                return

    def _sample(self) -> None:
        with self._sampling:
            sample: Sample = {}
            steps: int | None = None  # no source counts them
            for name, source in list(self._sources.items()):
                try:
                    figures = source()
                    sample |= sample_of(name, figures)
                except Exception as error:  # the source is the training's own, which goes on
                    self._warn(name, f"the figures of {name} could not be read: {error!r}")
                else:
                    if "steps" in figures:
                        steps = max(steps or 0, _whole(figures["steps"]))
            if sample:
                self._write(sample, steps)

    def _write(self, sample: Sample, steps: int | None) -> None:
        self._samples += 1
        if self._folder is not None:
            try:
                if self._events is None:
                    self._events = EventFile(self._folder)
                self._events.write(self._samples if steps is None else steps, time.time(), _scalars(sample))
            except Exception as error:
                self._warn("events", f"--tensorboard={str(self._folder)!r}: {_words(error)}; the training goes on")
        if self._page is not None:
            try:
                self._page.publish(sample)
            except Exception as error:
                page, self._page = self._page, None
                page.close()
                if self._speaks:
                    where = f"--metrics-port={page.port} at {page.address}"
                    self._warn("page", f"{where}: {_words(error)}; no metrics there, the training goes on")

    def _end(self) -> None:
        atexit.unregister(self._end)
        self._stop.set()
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            self._thread.join(timeout=2 * PERIOD)
        if self._sources:  # the process ends, and nobody has closed them
            self._sample()
            self._sources.clear()
        self._close()

    def abandon(self) -> None:
        """In a forked child: leave the parent's file and page alone, whoever closes a watch here."""
        atexit.unregister(self._end)
        self._sources.clear()
        self._events = self._page = self._folder = None

    def _warn(self, what: str, text: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            warn(text)


def _words(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else repr(error)


def _whole(figure: Figure) -> int:
    return int(figure) if isinstance(figure, (int, float)) else 0


def _scalars(sample: Sample) -> dict[str, float]:
    """The sample by TensorBoard's tags: `lms/peak_bytes`, and the values of labels behind."""
    return {
        "/".join((*name.split("_", 1), *labels)): value for name, values in sample.items() for labels, value in values
    }


_lock = threading.Lock()
_samplers: dict[Outputs, _Sampler] = {}


def _after_fork() -> None:
    # The thread stayed in the parent: a forked child is not watched.
    global _lock
    _lock = threading.Lock()
    for sampler in _samplers.values():
        sampler.abandon()
    _samplers.clear()


os.register_at_fork(after_in_child=_after_fork)
