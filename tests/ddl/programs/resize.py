"""Allreduces of a job that others join. Every sum is compared with NumPy's.

Arguments: `join NAME` in a process that joins, under a number of its own; `until NAMES` ends the job some steps after
its ranks are these, by commas; STEP:NAME kills that rank at that step; SECONDS+NAME kills it so long after it has begun
to join, or to take others in; `apart` takes in as soon as one waits.
"""

import sys
import threading
import time

import numpy as np
from steps import data_of, die

import ddl

STEPS = 12

words = sys.argv[1:]
expected = sorted(int(name) for name in words[words.index("until") + 1].split(","))
in_step = {int(name): int(step) for step, _, name in (word.partition(":") for word in words) if name}
in_resize = {int(name): float(late) for late, _, name in (word.partition("+") for word in words) if name}
joins = "join" in words
who = int(words[words.index("join") + 1]) if joins else -1


def begin_to_change() -> None:
    """A timer for who is to die meanwhile."""
    if who in in_resize:
        threading.Timer(in_resize.pop(who), die).start()


if joins:
    begin_to_change()
    ddl.join()
    print(f"{who} is rank {ddl.rank()} of {ddl.size()} in epoch {ddl.epoch()}", flush=True)
else:
    ddl.init()
    who = ddl.rank()
step, last, begun = (1 << 30) if joins else 0, 1 << 31, True
members: list[int] = []
while step < last:
    try:
        if begun:  # of this epoch nothing is known yet, and survivors may be one step apart
            members = ddl.allgather(np.array([who])).ravel().tolist()
            step = int(ddl.allreduce(np.array([step]), "min")[0])
            if sorted(members) == expected:
                last = step + STEPS
            begun = False
            print(f"{who}: epoch {ddl.epoch()} with {members}", flush=True)
        if in_step.get(who) == step:
            die()
        total = ddl.allreduce(data_of(who, step), "sum")
        waiting = int(ddl.allreduce(np.array([ddl.waiting()]), "max")[0])
        time.sleep(0.002)
    except ddl.PeerLostError:
        begun = True
    else:
        np.testing.assert_array_equal(total, sum(data_of(one, step) for one in members))
        step += 1
        missing = len([name for name in expected if name not in members])
        begun = waiting > 0 and (waiting >= missing or "apart" in words)
    if begun:
        begin_to_change()
        before, size = ddl.epoch(), ddl.size()
        epoch = ddl.resize()
        assert before < epoch.number == ddl.epoch()
        assert epoch.size == ddl.size() == size - len(epoch.gone) + epoch.joined, epoch
print(f"{who}: right to the end, with {members}", flush=True)
