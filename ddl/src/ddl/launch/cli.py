"""The command `ddlrun`: run a program on every GPU of some hosts, or check whether these are fit for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

import ddl
from ddl.launch import options, run
from ddl.launch.console import say
from ddl.launch.errors import CheckError, LaunchError

INTERRUPTED = 130  # what shells return for a command that Ctrl-C ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (sys.argv's when None); return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _dispatch(words)
        sys.stdout.flush()
        return status
    except LaunchError as error:
        for line in error.lines if isinstance(error, CheckError) else (str(error),):
            say(f"error: {line}")
        return error.exit_status
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output (a pager, head) has enough. Python would complain again when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _dispatch(words: list[str]) -> int:
    if words[:1] in (["bench"], ["plan"]):
        return _elsewhere(words[0], words[1:])
    asked = options.parse(words or ["--help"])
    if asked.help:
        print(options.usage(), end="")
        return 0
    if asked.version:
        print(f"ddlrun {ddl.__version__}")
        return 0
    return run.doctor(asked) if asked.command == "doctor" else run.run(asked)


def _elsewhere(name: str, words: list[str]) -> int:
    """Hand the rest of the command line to the command's own module: `main(words) -> exit status`."""
    module = "ddl.bench.cli" if name == "bench" else "ddl.launch.plan"
    return int(import_module(module).main(words))  # here: plain runs need neither
