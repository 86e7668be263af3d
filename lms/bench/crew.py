"""The processes of the benchmark: one a cell, kept alive, told to compute one at a time."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

import allocators
from cap import Cap
from figures import Step

from lms.torch.launcher import missing_environment

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "src"


def checkout(text: str) -> Path:
    """An argument of the command line: the folder of another checkout. Tables show its name."""
    tree = Path(text).resolve()
    if not (tree / "lms" / "src" / "lms").is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: expected the folder of another checkout, with lms/src/lms in it")
    if tree.name in ("plain", "identity", "lms"):
        raise argparse.ArgumentTypeError(f"{text!r}: its name is that of a contestant; give the checkout another one")
    return tree


class WorkerError(Exception):
    """A cell's process ended when it should not have; the message has the last lines that it wrote."""


class Worker:
    """The process of one cell. `cap` is entered already, and closed with the worker.

    It starts in the environment that is there; LMS's with what `lms run` adds, jemalloc's with what loads that. It runs
    `program` with the LMS of the folder `source`.

    Raises WorkerError if the process does not come up.
    """

    def __init__(
        self,
        config: Mapping[str, object],
        cap: Cap | None = None,
        *,
        program: Path = HERE / "worker.py",
        source: Path = SOURCE,
    ) -> None:
        self.cap = cap
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in close()
        argv = [sys.executable, str(program), json.dumps(config)]
        path = os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH")]))
        environment = allocators.environment(str(config["kind"]), os.environ)
        if config["kind"] == "lms":
            environment = missing_environment(os.environ)
        self._process = subprocess.Popen(
            cap.command(argv) if cap is not None else argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **environment, "PYTHONPATH": path},
        )
        try:
            self.opening = self._answer()
        except WorkerError:
            self.close()
            raise

    def step(self) -> Step:
        """Let it take one step; returns when it has. Raises WorkerError if it dies over it."""
        return Step(**self.ask())  # type: ignore[arg-type]

    def ask(self) -> dict[str, object]:
        """Its answer to "step". Raises WorkerError if it dies over it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the missing answer says it better
            self._process.stdin.write('{"do": "step"}\n')
            self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process and its cap. Idempotent."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self.cap is not None:
            self.cap.close()
        self._errors.close()

    def _answer(self) -> dict[str, object]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)  # type: ignore[no-any-return]
        status = self._process.wait()
        self._errors.seek(0)
        last = "".join(self._errors.readlines()[-20:])
        killed = ", killed at its memory cap" if self.cap is not None and self.cap.kills() else ""
        raise WorkerError(f"the process ended with status {status}{killed}\n{last}".strip())


class Progress:
    """A bar with the time left, on a terminal; now and then a line, elsewhere."""

    def __init__(self, total: int, stream: TextIO) -> None:
        self.total, self.stream = total, stream
        self.count = 0
        self._start = time.monotonic()
        self._shown = -1

    def advance(self, label: str) -> None:
        """One more of `total` is done; `label` says what comes next."""
        self.count += 1
        left = (time.monotonic() - self._start) / self.count * max(0, self.total - self.count)
        text = f"{label:<28} {self.count}/{self.total} steps, {left // 60:.0f} min {left % 60:02.0f} s left"
        if self.stream.isatty():
            full = round(24 * min(1.0, self.count / self.total))
            self.stream.write(f"\r[{'#' * full}{'.' * (24 - full)}] {text}\x1b[K")
        elif (tenth := 10 * self.count // self.total) > self._shown:
            self._shown = tenth
            self.stream.write(text + "\n")
        self.stream.flush()

    def close(self) -> None:
        """Leave the line."""
        if self.stream.isatty():
            self.stream.write("\n")
