"""Ranks that average large buffers, one of them late each time; prints what each rank has seen, and the host's page."""

import sys
import time
import urllib.request

import numpy as np

import ddl

CALLS = 10

ddl.init()
late, port = int(sys.argv[1]), sys.argv[2]
data = np.ones(64 << 10, np.float32)
for _ in range(CALLS):
    if ddl.rank() == late:
        time.sleep(0.1)
    ddl.allreduce(data, op="average")
ddl.allreduce(data[:1].copy(), op="sum")  # too small to be timed
found = ddl.stats()
print(f"rank {ddl.rank()}: {found.calls} {found.bytes} {found.timed} {found.bound} late {dict(found.late)}")
print(f"rank {ddl.rank()}: {0 < found.seconds < 60} {all(0 < one < found.seconds for one in found.waited.values())}")
# Until the page has all ranks at their last call: a rank samples once a second.
until = time.monotonic() + 60
while ddl.rank() == 0:
    page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
    done = [
        line
        for line in page.splitlines()
        if line.startswith("ddl_collectives_total") and line.endswith(f" {CALLS + 1}.0")
    ]
    if len(done) == ddl.size() or time.monotonic() > until:
        print(page)
        break
    time.sleep(0.1)
ddl.barrier()
