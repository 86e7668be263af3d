"""Rank 0 asks itself, by SIGUSR1, what it has in flight: nothing, then an allreduce that rank 1 has not called.

Rank 1 calls it once the file `argv[1]` is there.
"""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import ddl

asked = Path(sys.argv[1])


def report(ends: bytes) -> None:
    """Ask until a report, which a thread of the library writes to stderr, has these words; print it."""
    own = os.dup(2)
    read, write = os.pipe()
    os.dup2(write, 2)
    text = b""
    while ends not in text:
        os.kill(os.getpid(), signal.SIGUSR1)
        text += os.read(read, 1 << 16)
    os.dup2(own, 2)
    print(text.decode(), flush=True)


ddl.init()
if ddl.rank() == 0:
    report(b"no requests in flight")
    waiting = ddl.allreduce_async(np.ones(4))
    report(b"awaiting rank 1")
    asked.touch()
else:
    while not asked.exists():
        time.sleep(0.01)
    waiting = ddl.allreduce_async(np.ones(4))
waiting.wait()
