"""Allreduces in which ranks kill themselves; the survivors shrink and go on. Every sum is compared with NumPy's.

Arguments: STEP:RANK of each that dies, by its first rank; SECONDS+RANK of each that dies so long after it has begun to
shrink; `cut` goes on until some are lost.
"""

import sys
import threading
import time

import numpy as np
import pytest
from steps import data_of, die

import ddl

STEPS = 24

ddl.init()
who, members = ddl.rank(), list(range(ddl.size()))  # by their first ranks
in_step = {int(rank): int(step) for step, _, rank in (word.partition(":") for word in sys.argv[1:]) if rank}
in_shrink = {int(rank): float(late) for late, _, rank in (word.partition("+") for word in sys.argv[1:]) if rank}
step, last = 0, 1 << 30 if "cut" in sys.argv else STEPS
shrunk = lost = False
held = ddl.split(0)
while step < last:
    if lost:
        if who in in_shrink:
            threading.Timer(in_shrink[who], die).start()
        before = ddl.epoch()
        epoch = ddl.shrink()
        members = [one for rank, one in enumerate(members) if rank not in epoch.gone]
        assert before < epoch.number == ddl.epoch()
        assert (members.index(who), len(members)) == (epoch.rank, epoch.size) == (ddl.rank(), ddl.size())
        shrunk = True
    try:
        if lost:  # survivors may be one step apart
            step = int(ddl.allreduce(np.array([step]), "min")[0])
            last = min(last, step + STEPS)
        if in_step.get(who) == step:
            die()
        total = ddl.allreduce(data_of(who, step), "sum")
        lost = False
    except ddl.PeerLostError:
        lost = True
        continue
    np.testing.assert_array_equal(total, sum(data_of(one, step) for one in members))
    if shrunk:
        print(f"right at {time.monotonic()}, in epoch {ddl.epoch()}", flush=True)
        shrunk = False
    step += 1
    if step == 3:
        print("begun", flush=True)
with pytest.raises(ddl.StateError, match="was freed"):
    ddl.barrier(comm=held)
with ddl.split(ddl.rank() % 2) as half:
    part = [one for rank, one in enumerate(members) if rank % 2 == ddl.rank() % 2]
    total = ddl.allreduce(data_of(who, 7), "sum", comm=half)
    np.testing.assert_array_equal(total, sum(data_of(one, 7) for one in part))
print(f"{who}: right to the end, with {members}", flush=True)
