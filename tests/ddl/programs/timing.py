"""`timing.py BYTES REPETITIONS`: how long an allreduce of float32 takes. Rank 0 prints one line of JSON, in seconds.

A repetition lasts from the last rank's call to the last rank's return; the clock is CLOCK_MONOTONIC, which all hosts of
a testbed share. The first repetition warms up and is not printed.
"""

import json
import sys
import time

import numpy as np

import ddl

count, repetitions = int(sys.argv[1]) // 4, int(sys.argv[2])
ddl.init()
data = np.ones(count, dtype=np.float32)
seconds = []
for _ in range(repetitions + 1):
    data[:] = 1
    ddl.barrier()
    moments = [time.monotonic()]
    ddl.allreduce(data)
    moments.append(time.monotonic())
    assert data[0] == data[-1] == ddl.size(), f"{data[0]} and {data[-1]}, not {ddl.size()}"
    began, ended = ddl.allgather(np.array(moments)).max(axis=0)
    seconds.append(float(ended - began))
if ddl.rank() == 0:
    print("timing " + json.dumps(seconds[1:]), flush=True)
ddl.finalize()
