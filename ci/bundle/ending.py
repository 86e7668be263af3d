"""The end of a process that has worked with py-rattler."""

import os
import sys
from typing import NoReturn


def leave(status: int) -> NoReturn:
    """End the process at once, with `status`.

    py-rattler's threads live on, and now and then one of them aborts the process while the interpreter goes down: what
    was done would count as failed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
