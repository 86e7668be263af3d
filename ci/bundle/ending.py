"""The ends of processes: of one that has worked with py-rattler, and of those that work for another."""

import ctypes
import os
import signal
import sys
from typing import NoReturn

_PR_SET_PDEATHSIG = 1  # of prctl(2)


def end_with(parent: int) -> None:
    """End this process when its parent, the process `parent`, is killed: nobody else would tell it.

    On Linux, what counts is the thread that has started it, which must be the parent's first.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was killed before
        os._exit(1)


def leave(status: int) -> NoReturn:
    """End the process at once, with `status`.

    py-rattler's threads live on, and now and then one of them aborts the process while the interpreter goes down: what
    was done would count as failed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
