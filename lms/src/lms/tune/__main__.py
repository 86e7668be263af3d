"""`python -m lms.tune [OPTIONS] FILE`: the process of one trial of an objective file, which `lms tune` starts."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from lms.console import say
from lms.errors import LMSError
from lms.options import add_flags, from_flags
from lms.target import Target, framework_of


def main() -> int:
    """Do the trial under LMS, with the framework that the file imports; the exit status is that of `lms run`."""
    parser = argparse.ArgumentParser(prog="python -m lms.tune", allow_abbrev=False)
    add_flags(parser)
    parser.add_argument("file", metavar="FILE")
    args = parser.parse_args()
    launcher = import_module(f"lms.{framework_of(Target(args.file))}.launcher")
    try:
        status: int = launcher.run(Target("lms.tune.objective", (args.file,), is_module=True), from_flags(args))
        return status
    except LMSError as error:
        say(f"error: {error}")
        return error.exit_status


if __name__ == "__main__":
    sys.exit(main())
