"""Averages for some seconds while strangers disturb the job; says how many sums were right."""

import sys
import time

import numpy as np

import ddl

ddl.init()
rank, size = ddl.rank(), ddl.size()
print(f"rank {rank} is in", flush=True)
end = time.monotonic() + float(sys.argv[1])
count = 0
over = False
while not over:
    data = np.full(30_000, rank + count, dtype=np.float32)
    data[0] = time.monotonic() > end
    ddl.allreduce(data, op="sum")
    over = data[0] > 0
    assert (data[1:] == sum(range(size)) + size * count).all(), "a wrong sum"
    count += 1
    time.sleep(0.01)
ddl.finalize()
print(f"rank {rank}: {count} right sums", flush=True)
