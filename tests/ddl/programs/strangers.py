"""Averages for some seconds while strangers disturb the job; says how many sums were right, and what it cost."""

import re
import sys
import time
from pathlib import Path

import numpy as np

import ddl


def megabytes(what: str) -> float:
    """Of this process: VmRSS or VmHWM."""
    found = re.search(rf"{what}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) / 1024


before = megabytes("VmRSS")
began = time.monotonic()
ddl.init()
joined = time.monotonic() - began
rank, size = ddl.rank(), ddl.size()
print(f"rank {rank} is in", flush=True)
end = time.monotonic() + float(sys.argv[1])
count = 0
longest = 0.0
over = False
while not over:
    data = np.full(30_000, rank + count, dtype=np.float32)
    data[0] = time.monotonic() > end
    began = time.monotonic()
    ddl.allreduce(data, op="sum")
    longest = max(longest, time.monotonic() - began)
    over = data[0] > 0
    assert (data[1:] == sum(range(size)) + size * count).all(), "a wrong sum"
    count += 1
    time.sleep(0.01)
ddl.finalize()
more = megabytes("VmHWM") - before
print(
    f"rank {rank}: {count} right sums, joined after {joined:.2f} s, longest sum {longest:.2f} s, {more:.1f} MB",
    flush=True,
)
