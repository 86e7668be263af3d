"""Rank 0 kills all others in one moment, so that none can tell it of another's death, and goes on alone.

Argument: an empty folder. No message has passed before, so that few ranks have a connection.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

import ddl


def is_stopped(pid: int) -> bool:
    """As the kernel says."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


ddl.init()
others = range(1, ddl.size())
folder = Path(sys.argv[1])
if ddl.rank() != 0:
    (folder / str(os.getpid())).touch()
    signal.pause()
while len(pids := [int(file.name) for file in folder.iterdir()]) < len(others):
    time.sleep(0.01)
for pid in pids:
    os.kill(pid, signal.SIGSTOP)
while not all(map(is_stopped, pids)):
    time.sleep(0.01)
# They die with its words unread, so that the kernel resets the connections.
threading.Timer(0.5, lambda: [os.kill(pid, signal.SIGKILL) for pid in pids]).start()
epoch = ddl.shrink()
assert (epoch.rank, epoch.size, list(epoch.gone)) == (0, 1, list(others))
assert ddl.allreduce(np.array([7.0]), "sum")[0] == 7
print("rank 0 goes on alone")
