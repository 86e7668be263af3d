"""A job that a fault happens to: `campaign.py WHAT VICTIM MOMENT`, as tests/ddl/faults/injection.py starts it.

The victim does WHAT to itself at MOMENT; "none" and "asleep" wait for a fault from outside, in collectives or without
calling ddl again. Every rank says which error it got.
"""

import os
import signal
import sys
import threading
import time

import numpy as np

import ddl

WHAT, VICTIM, MOMENT = sys.argv[1], int(sys.argv[2]), sys.argv[3]
RANK = int(os.environ["RANK"])
AT = 6  # allreduces before the moment
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM, "abort": signal.SIGABRT}


def suffer() -> None:
    """The fault of the victim."""
    if WHAT in SIGNALS:
        os.kill(os.getpid(), SIGNALS[WHAT])
    elif WHAT == "exit":
        sys.exit(3)
    elif WHAT == "leave":
        os._exit(4)
    elif WHAT == "raise":
        raise ValueError("a defect of the program")
    elif WHAT == "never":
        time.sleep(600)
    elif WHAT == "type":
        ddl.allreduce(np.ones(1_000_000, np.float64), "average")
    elif WHAT == "count":
        ddl.allreduce(np.ones(999_999, np.float32), "average")
    elif WHAT == "operation":
        ddl.allreduce(np.ones(1_000_000, np.float32), "max")
    elif WHAT == "order":
        ddl.broadcast(np.ones(1_000_000, np.float32))


def reach(moment: str) -> None:
    if moment == MOMENT and VICTIM == RANK:
        if RANK != 0:
            time.sleep(0.2)  # the others are waiting already
        print("now", flush=True)
        suffer()


reach("start")
data = np.ones(1_000_000, np.float32)  # 4 MB: some 0.3 s at 200 Mbit/s
try:
    ddl.init()
    for step in range(AT if MOMENT == "finalize" else 1_000_000):
        if step == AT:
            if WHAT == "asleep" or (WHAT in ("none",) and RANK == 0):
                print("now", flush=True)
            if WHAT == "asleep":
                time.sleep(600)
            reach("call")
        if step == AT and MOMENT == "middle" and VICTIM == RANK:
            print("now", flush=True)
            threading.Timer(0.05, suffer).start()
        ddl.allreduce(data, "average")
    reach("finalize")
except ddl.DDLError as error:
    print(f"rank {RANK}: {type(error).__name__}: {error}", flush=True)
    sys.exit(1)
