"""The command `ddlrun`, which passes a command line to the launcher, the benchmark or the planner."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ddl.launch import arguments, options, run
from ddl.launch.console import say
from ddl.launch.errors import CheckError, LaunchError

INTERRUPTED = 130  # what shells return for a command that Ctrl-C ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (sys.argv's when None); return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if "HOME" not in os.environ:  # Open MPI does not start without it
        home = os.path.expanduser("~")
        os.environ["HOME"] = home if os.path.isabs(home) else "/"  # as login does for a user without a home
    try:
        return _dispatch(words)
    except LaunchError as error:
        for line in error.lines if isinstance(error, CheckError) else (str(error),):
            say(f"error: {line}")
        return error.exit_status
    except KeyboardInterrupt:
        return INTERRUPTED


def _dispatch(words: list[str]) -> int:
    # Imported here, because plain runs need neither.
    if words[:1] == ["bench"]:
        from ddl.bench import cli as bench

        return bench.main(words[1:])
    if words[:1] == ["plan"]:
        from ddl.planning import cli as planning

        return planning.main(words[1:])
    asked = options.parse(words or ["--help"])
    if asked is None:
        return 0
    arguments.mask(asked.secrets)
    return run.doctor(asked) if asked.command == "doctor" else run.run(asked)


if __name__ == "__main__":
    sys.exit(main())
