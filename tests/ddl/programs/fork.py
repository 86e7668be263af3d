"""Each rank forks a child that ends through Python's exit handlers: the child is no rank, and the ranks go on."""

import os
import sys
from collections.abc import Callable

import numpy as np

import ddl


def is_refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except ddl.StateError as error:
        return "was forked by a rank" in str(error)
    return False


ddl.init()
assert (ddl.allreduce(np.ones(10, np.float32), "sum") == ddl.size()).all()
child = os.fork()
if child == 0:
    sys.exit(5 if all(map(is_refused, (ddl.init, ddl.rank, ddl.barrier))) else 1)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 5, status
for count in (10, 100_000):
    assert (ddl.allreduce(np.ones(count, np.float32), "sum") == ddl.size()).all()
ddl.barrier()
if ddl.rank() == 0:
    print("right", flush=True)
