"""Allreduces in a loop; one rank does something else in the middle, and the others print what they get, and when."""

import os
import sys
import time

import numpy as np

import ddl

FAULT, VICTIM, AT = sys.argv[1], 1, 20
COUNT = int(sys.argv[2]) if len(sys.argv) > 2 else 300_000  # elements


def misbehave() -> None:
    """The victim's fault in place of the allreduce."""
    if FAULT == "kill":
        os.kill(os.getpid(), 9)
    elif FAULT == "leave":  # without a word to MPI
        os._exit(0)
    elif FAULT == "raise":
        raise ValueError("a defect of the program")
    elif FAULT == "other":
        ddl.allreduce(np.ones(7, np.float64), "max")
    elif FAULT == "late":
        time.sleep(600)


ddl.init()
data = np.ones(COUNT, np.float32)
if "DDL_CUDA_LIB" in os.environ:  # the stub's
    import gpu

    data = gpu.Array(data)
last = time.monotonic()
try:
    for step in range(1_000_000):
        if step == AT and ddl.rank() == VICTIM:
            misbehave()
        ddl.allreduce(data, "average")
        last = time.monotonic()
        if step == AT and ddl.rank() == 0 and FAULT == "none":
            print("begun", flush=True)
except ddl.DDLError as error:
    print(f"rank {ddl.rank()} after {time.monotonic() - last:.1f} s: {type(error).__name__}: {error}", flush=True)
    if FAULT == "hang":  # of a GPU: every rank is to say what it got before mpirun ends those that are left
        time.sleep(4)
    sys.exit(1)
